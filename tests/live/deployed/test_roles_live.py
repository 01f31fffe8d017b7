"""Access to a live service: roles, and policies whose code the deployment does not allow."""

import asyncio

import pytest
from waiting import until

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import PoliciesRejected
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.policies.families.ordering import Fcfs
from tailrace.policies.families.registry import Policies


class Elsewhere(Fcfs):
    """A policy of this test module, which the service does not know."""


def batch(name: str) -> RolloutBatch:
    group = PromptGroup(prompt_id="p", text="One, two,", samples=2, max_tokens=8)
    return RolloutBatch(batch_id=name, groups=(group,), seed=1)


def test_an_observer_reads_the_status_alone(client):
    observer = RolloutClient(role="observer")
    until(lambda: len(observer.status_blocking().replicas) == 2)
    changes = observer.replica_changes_blocking()
    assert next(changes).wanted >= 1
    changes.close()
    for call in (
        lambda: list(observer.rollout_blocking(batch("observed"))),
        lambda: observer.update_weights_blocking(1, "/nowhere"),
        lambda: observer.cancel_blocking("any"),
    ):
        with pytest.raises(PermissionError, match=r"needs role \w+, and this client is observer$"):
            call()
    assert client.status_blocking().batches == ()


def test_an_evaluator_rolls_out_and_changes_nothing(client):
    evaluator = RolloutClient(role="evaluator")
    (group,) = evaluator.rollout_blocking(batch("evaluated"))
    assert len(group.samples) == 2
    with pytest.raises(PermissionError, match=r"^forget_history needs role trainer, and this client is evaluator$"):
        evaluator.forget_history_blocking()
    with pytest.raises(PermissionError):
        evaluator.set_policies_blocking(Policies())


def test_policies_of_a_package_that_is_not_allowed_are_refused_by_the_service(client):
    with pytest.raises(PoliciesRejected, match=r"code of package '\w+' is not allowed and was not imported") as caught:
        asyncio.run(client.set_policies(Policies(ordering=Elsewhere())))
    assert "\n" not in str(caught.value)
    client.set_policies_blocking(Policies())
