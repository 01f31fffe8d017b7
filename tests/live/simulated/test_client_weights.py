"""A client's weights over a scripted coordinator: staged in a folder of this test, committed by their digest."""

from types import SimpleNamespace

import numpy as np
import pytest
from scripted_service import Service, client_of, loaded, run

from tailrace.app.calls import staged_weights
from tailrace.app.calls.refused import (
    WeightsRejected,
)
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import Rejected
from tailrace.deployments.staging.slots import AlreadyStaging, MemorySource, Slots
from tailrace.deployments.staging.stage import Stage


def test_the_present_weights_get_a_higher_number_and_no_other():
    status = SimpleNamespace(weights_version=4, weights_source="folder", weights_digest="d")
    service = Service(status=[status], update_weights=[loaded(7)])
    assert run(client_of(service).rename_weights("7")).version == 7
    assert service.named("update_weights") == [(Role.TRAINER, 7, "folder", "d")]
    with pytest.raises(ValueError, match="weight version 'seven': give a number, 4 or above"):
        run(client_of(service).rename_weights("seven"))
    status.weights_source = ""
    with pytest.raises(ValueError, match="weight version 7: the weights are those of the start; update them first"):
        run(client_of(service).rename_weights("7"))
    assert len(service.named("update_weights")) == 1


@pytest.mark.parametrize(("version", "asked"), [(None, 5), (9, 9)])
def test_a_transfer_is_committed_under_its_own_version_or_the_given_one(version, asked):
    source = str(MemorySource("app-0", 5, "0" * 16))
    service = Service(transfer_weights=[source], update_weights=[loaded(asked)])
    run(client_of(service).finish_transfer(version))
    assert service.named("transfer_weights") == [(Role.TRAINER, "finish", None)]
    assert service.named("update_weights") == [(Role.TRAINER, asked, source, "0" * 16)]


@pytest.fixture
def slots(tmp_path, monkeypatch) -> Slots:
    """The service's, and `kept`: calls that have a keeper for them."""
    from tailrace.deployments.staging import keeper

    slots, kept = Slots("app-0", tmp_path), []
    monkeypatch.setattr(staged_weights, "Slots", lambda name: Slots(name, tmp_path))
    monkeypatch.setattr(staged_weights.Staging, "name", lambda self: "app-0")
    monkeypatch.setattr(keeper, "keep_slots", lambda *given: kept.append(given))
    object.__setattr__(slots, "kept", kept)
    return slots


TENSORS = {"a": np.arange(3, dtype=np.float32), "b": np.ones(2, np.int8)}


def test_weights_are_staged_kept_and_committed_by_their_digest(slots):
    status = SimpleNamespace(weights_version=4, weights_digest="d")
    service = Service(status=[status], update_weights=[loaded(7)])

    async def story():
        client = client_of(service, app_name="mine")
        staged = await client.stage_weights(7, TENSORS)
        assert (staged.version, staged.tensors, staged.staged_bytes) == (7, 2, 14) and slots.part.exists()
        assert slots.kept == [("app-0", "mine")] and service.named("update_weights") == []
        return staged, await client.commit_weights(staged)

    staged, done = run(story())
    ((version, digest),) = slots.held()
    assert version == 7 and done.staged_s == staged.seconds
    assert service.named("update_weights") == [(Role.TRAINER, 7, str(MemorySource("app-0", 7, digest)), digest)]
    staged.drop()
    assert len(slots.held()) == 1, "it is sealed"


def test_no_stage_begins_while_the_service_loads_a_sealed_slot(slots):
    """The next one took the slot of weights that the replicas were checking."""
    status = SimpleNamespace(weights_version=4, weights_digest="d")

    def load():
        ((version, _),) = slots.held()
        with pytest.raises(AlreadyStaging):
            Stage(slots, 8, (4, "d"))
        return loaded(version)

    service = Service(status=[status], update_weights=[load, Rejected(reason="no")])

    async def story():
        client = client_of(service)
        assert (await client.send_weights(7, TENSORS)).version == 7
        with pytest.raises(WeightsRejected, match="no"):
            await client.send_weights(8, TENSORS)
        Stage(slots, 9, (7, "d")).drop()

    run(story())


def test_weights_that_cannot_be_staged_leave_the_way_free_and_those_that_are_served_stay(slots):
    status = SimpleNamespace(weights_version=0, weights_digest="")
    service = Service(status=[status], update_weights=[loaded(1), loaded(2), Rejected(reason="no")])

    async def story():
        client = client_of(service)
        await client.send_weights(1, TENSORS)
        ((version, digest),) = slots.held()
        status.weights_version, status.weights_digest = version, digest
        with pytest.raises(ValueError, match="tensor c is a list"):
            await client.send_weights(2, TENSORS | {"c": [1.0]})
        assert not slots.part.exists()
        await client.send_weights(2, {"a": np.ones(9)})
        with pytest.raises(WeightsRejected, match="no"):
            await client.send_weights(3, {"a": np.ones(8)})
        assert (version, digest) in slots.held() and not slots.part.exists()
        staged = await client.stage_weights(4, TENSORS)
        staged.drop()
        assert not slots.part.exists()

    run(story())


def test_a_version_that_ranks_have_published_is_loaded_again_by_any_of_them(slots):
    done = loaded(7)
    service = Service(publish_weights=[done, Rejected(reason="rank 1 is late")], update_weights=[done])
    client = client_of(service)
    assert run(client.publishing.run("staged", 7, 1, ())) is done
    assert run(client._weights.restore(7))
    source = str(MemorySource("app-0", 7, done.digest))
    assert service.named("update_weights") == [(Role.TRAINER, 7, source, done.digest)]
    with pytest.raises(WeightsRejected, match=r"^rank 1 is late$"):
        run(client.publishing.run("join", 8, 1))
    assert client._weights.version == 7


@pytest.mark.parametrize("role", ["evaluator", "observer"])
def test_slots_are_a_trainer_s_alone(slots, role):
    with pytest.raises(PermissionError, match=f"own_slots needs role trainer, and this client is {role}"):
        run(client_of(Service(), role=role).own_slots())
    assert slots.kept == []
    assert run(client_of(Service()).own_slots()) == "app-0" and len(slots.kept) == 1
