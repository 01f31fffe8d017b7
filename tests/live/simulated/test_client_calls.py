"""The client's calls over a scripted coordinator: what goes out, what comes back, and when a call is made again."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_service import Lost, Service, client_of, loaded, run
from waiting import until

from tailrace.app.calls import driver_spans, result_texts, resume
from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.own_loads import READER_S
from tailrace.app.calls.refused import (
    AdapterRejected,
    PoliciesRejected,
    QuotaExceeded,
    RolloutRejected,
    TooLargeForQuota,
    UnknownAdapter,
    WeightsRejected,
)
from tailrace.app.calls.result_texts import ResultTexts
from tailrace.app.calls.resume import PAUSE_S, Heartbeat, Interrupted, ReceivedGroups, Retries
from tailrace.deployments.batches import prompts
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.delivery import ACKNOWLEDGE_BYTES
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RejectedBy, RolloutBatch, WeightsLoaded
from tailrace.policies.families.registry import Policies

CALLS = {
    "cancel": ("b",),
    "forget_history": (),
    "inspect_group": ("b/p",),
    "pool_detail": (),
    "drain_pool": (),
    "reset_caches": (),
    "status": (7,),
    "sample_detail": ("s",),
    "sample_log": ("b/p#1",),
    "batch_log": ("b",),
    "cancel_all": (),
    "cancel_samples": ("b", "p", 3),
    "close_session": ("b",),
    "transfer_weights": ("init", {"a": 1}),
    "publish_weights": ("renew", 3, 1, None),
}


def call_of(client: RolloutClient, name: str):
    """The client's method for a call of the coordinator; some are of its parts."""
    samples = {"cancel_samples": client.samples.cancel, "close_session": client.samples.close}
    samples |= {"publish_weights": client.publishing.run}
    return samples[name] if name in samples else getattr(client, name)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_the_coordinator_s_and_so_is_its_answer(name):
    answer = object()
    service = Service(**{name: [answer]})
    assert run(call_of(client_of(service, role="observer"), name)(*CALLS[name])) is answer
    assert service.asked == [(name, Role.OBSERVER, *CALLS[name])]


@pytest.mark.parametrize("name", CALLS)
def test_a_role_without_the_right_is_an_error(name):
    service = Service(**{name: [Rejected(reason="observers may not", by=RejectedBy.ROLE)]})
    with pytest.raises(PermissionError, match=r"^observers may not$"):
        run(call_of(client_of(service), name)(*CALLS[name]))


@pytest.mark.parametrize(
    ("name", "arguments", "asked", "error"),
    [
        ("pause", ("wait",), ("pause", "wait"), None),
        ("reserve", (3,), ("reserve", 3), None),
        ("resume", (), ("resume",), ValueError),
        ("sleep", ("abort",), ("sleep", "abort"), ValueError),
        ("sleep", (), ("sleep", "keep"), ValueError),
        ("wake_up", (), ("wake_up", ("weights", "kv_cache")), ValueError),
        ("wake_up", (["kv_cache"],), ("wake_up", ("kv_cache",)), ValueError),
        ("check_weights", (), ("read_weights",), ValueError),
        ("update_weights", (3, "folder"), ("update_weights", 3, "folder", ""), WeightsRejected),
        ("load_adapter", ("poet", "/a"), ("load_adapter", "poet", "/a"), AdapterRejected),
        ("unload_adapter", ("poet",), ("unload_adapter", "poet"), AdapterRejected),
        ("set_policies", (Policies(),), ("set_policies", Policies().model_dump(mode="json")), PoliciesRejected),
        ("transfer_weights", ("finish",), ("transfer_weights", "finish", None), ValueError),
    ],
)
def test_a_refusal_is_raised_with_its_reason(name, arguments, asked, error):
    answer = WeightsLoaded(version=3, digest="d", replicas=())
    service = Service(**{asked[0]: [answer, Rejected(reason="the reason")]})
    client = client_of(service)
    given = run(getattr(client, name)(*arguments))
    if name in ("check_weights", "update_weights", "load_adapter", "transfer_weights"):
        assert given is answer
    assert service.asked == [(asked[0], Role.TRAINER, *asked[1:])]
    if error is not None:
        with pytest.raises(error, match=r"^the reason$") as raised:
            run(getattr(client, name)(*arguments))
        assert type(raised.value) is error


def test_a_part_that_does_not_sleep_is_not_woken():
    service = Service(wake_up=[None])
    with pytest.raises(ValueError, match="tags: 'kv' is not a part that sleeps; give weights, kv_cache"):
        run(client_of(service).wake_up(["weights", "kv"]))
    assert service.asked == []


def test_rewards_have_the_index_of_their_sample():
    service, group = Service(record_rewards=[None]), SimpleNamespace(prompt_key="key", step=4)
    run(client_of(service).record_rewards(group, [0.5, 1.0]))
    run(client_of(service).record_rewards(group, {3: 2.0}))
    assert service.named("record_rewards") == [
        (Role.TRAINER, "key", 4, {0: 0.5, 1: 1.0}),
        (Role.TRAINER, "key", 4, {3: 2.0}),
    ]


# ---- calls that are made again --------------------------------------------------------------------------


def test_a_call_is_made_again_while_the_coordinator_is_lost_with_growing_pauses_and_not_for_ever():
    async def story():
        now = asyncio.get_running_loop().time
        times = []

        def lost():
            times.append(now())
            return Lost()

        service = Service(status=[lost])
        with pytest.raises(Lost):
            await client_of(service, resume_s=20.0).status()
        assert times == pytest.approx([0.0, 0.2, 0.6, 1.4, 3.0, 6.2, 11.2, 16.2, 21.2])

    run(story())


def test_an_error_of_the_call_itself_is_not_tried_again():
    service = Service(status=[KeyError("a defect")])
    with pytest.raises(KeyError):
        run(client_of(service).status())
    assert len(service.asked) == 1


def test_patience_begins_anew_with_progress_and_each_bound_has_its_own():
    async def story():
        loop, broken = asyncio.get_running_loop(), Interrupted(ValueError("quota"))
        retries = Retries(10.0)
        began_s = loop.time()
        for _ in range(4):
            await retries.wait(broken)
        retries.renew()
        assert loop.time() - began_s == pytest.approx(3.0)
        await retries.wait(Interrupted(ValueError("paused"), pause_s=2.5))
        assert loop.time() - began_s == pytest.approx(5.5), "the longer of both pauses"
        retries.renew()
        reader = Interrupted(RolloutRejected("another reader"), for_s=1.0)
        with pytest.raises(RolloutRejected):
            for _ in range(9):
                await retries.wait(reader)
        for _ in range(3):
            await retries.wait(broken)  # its bound is another
        with pytest.raises(ValueError, match="quota"):
            for _ in range(9):
                await retries.wait(broken)
        assert PAUSE_S == (0.2, 5.0) and str(reader) == "another reader"

    run(story())


def test_the_number_of_taken_groups_goes_out_by_bytes_and_a_lost_one_later():
    sent, fails = [], []

    def send(count: int) -> None:
        sent.append(count)
        if fails:
            raise fails.pop()

    received = ReceivedGroups(send)
    tokens = ACKNOWLEDGE_BYTES // 8
    small = SimpleNamespace(samples=(), prompt_token_ids=())
    large = SimpleNamespace(samples=(), prompt_token_ids=range(tokens))  # four bytes each
    for group in (small, large, small, large, small, large):
        received.add(group)
    assert sent == [4]
    fails.append(Lost())
    received.add(large)
    received.send()
    assert sent == [4, 7, 7] and received.count == 7
    fails.append(KeyError("a defect"))
    received.add(large)
    with pytest.raises(KeyError):
        received.add(large)


def test_a_heart_beats_on_a_thread_of_its_own_until_it_is_stopped(monkeypatch):
    monkeypatch.setattr(resume, "RENEW_S", 0.002)
    beats = []

    def beat() -> None:
        beats.append(1)
        raise ConnectionError("the service is away")

    heart = Heartbeat(beat)
    until(lambda: len(beats) > 2)
    heart.stop()
    until(lambda: stays(beats))


def stays(beats: list) -> bool:
    before = len(beats)
    time.sleep(0.02)
    return len(beats) == before


# ---- batches --------------------------------------------------------------------------------------------


def batch_of(*names: str, **settings) -> RolloutBatch:
    groups = tuple(PromptGroup(prompt_id=name, token_ids=(1,)) for name in names)
    return RolloutBatch(**{"batch_id": "b", "groups": groups} | settings)


def group(name: str):
    return SimpleNamespace(prompt_id=name, samples=(), prompt_token_ids=())


async def rolled(client: RolloutClient, batch: RolloutBatch) -> list[str]:
    return [one.prompt_id async for one in client.rollout(batch)]


def test_a_batch_goes_on_after_a_loss_without_the_groups_that_have_come():
    service = Service(rollout=[[group("p"), Lost()], [group("q")], [group("r")]])
    client = client_of(service)
    assert run(rolled(client, batch_of("p", "q", "r"))) == ["p", "q", "r"]
    asked = service.named("rollout")
    assert [have for _, _, _, have, _ in asked] == [["p", "q", "r"]] * 3 and not any(one[-1] for one in asked)
    assert len({driver for _, _, driver, *_ in asked}) == 1
    assert all(call.cancels == 1 for call in service.calls) and service.hearts[0].stopped


def test_a_batch_that_was_cancelled_is_asked_for_as_such_after_a_loss_and_not_once_it_begins_anew():
    async def story():
        service = Service(rollout=[[group("p"), Lost()], [group("q")]], cancel=[False, True])
        client = client_of(service)
        await client.cancel("b")  # nothing is in flight
        groups = client.rollout(batch_of("p", "q"))
        await anext(groups)
        await client.cancel("b")
        assert [one.prompt_id async for one in groups] == ["q"]
        service.answers["rollout"] = [[group("p")]]
        await rolled(client, batch_of("p"))
        assert [one[-1] for one in service.named("rollout")] == [False, True, False]

    run(story())


def test_a_driver_renews_its_batch_with_the_number_of_groups_that_it_has_taken():
    service = Service(rollout=[[group("p"), group("q")]], renew=[None])

    async def story():
        groups = client_of(service).rollout(batch_of("p", "q"))
        await anext(groups)
        (beats,) = service.hearts
        beats.beat()
        await anext(groups)
        beats.beat()
        assert not beats.stopped
        await groups.aclose()
        driver = service.named("rollout")[0][2]
        assert service.named("renew") == [(Role.TRAINER, "b", driver, 0), (Role.TRAINER, "b", driver, 1)]
        assert beats.stopped and service.calls[0].cancels == 1

    run(story())


@pytest.mark.parametrize(
    ("by", "error", "again_after_loss"),
    [
        (RejectedBy.CONTENT, RolloutRejected, False),
        (RejectedBy.QUOTA, QuotaExceeded, True),
        (RejectedBy.SIZE, TooLargeForQuota, False),
        (RejectedBy.WEIGHTS, RolloutRejected, False),
        (RejectedBy.ADAPTER, UnknownAdapter, False),
    ],
)
def test_a_refused_batch_is_not_asked_again_but_for_a_quota_once_it_was_taken(by, error, again_after_loss):
    refusal = [Rejected(reason="no", by=by)]
    service = Service(rollout=[refusal])
    with pytest.raises(RolloutRejected, match=r"^no$") as raised:
        run(rolled(client_of(service), batch_of("p")))
    assert type(raised.value) is error and len(service.asked) == 1
    service = Service(rollout=[[Lost()], refusal, refusal, [group("p")]])
    if again_after_loss:
        assert run(rolled(client_of(service), batch_of("p"))) == ["p"]
        return
    with pytest.raises(error):
        run(rolled(client_of(service), batch_of("p")))
    assert len(service.asked) == 2


def test_a_batch_that_another_driver_reads_is_waited_for_and_not_for_long():
    async def story():
        now = asyncio.get_running_loop().time
        service = Service(rollout=[[Rejected(reason="read", by=RejectedBy.READER)]])
        with pytest.raises(RolloutRejected, match="read"):
            await rolled(client_of(service), batch_of("p"))
        assert READER_S <= now() < READER_S + 2 * PAUSE_S[1]
        service = Service(rollout=[[Rejected(reason="read", by=RejectedBy.READER)]] * 2 + [[group("p")]])
        assert await rolled(client_of(service), batch_of("p")) == ["p"]

    run(story())


def test_a_service_that_was_restarted_gets_the_last_weights_again():
    refusal = [Rejected(reason="old", by=RejectedBy.WEIGHTS)]
    service = Service(update_weights=[loaded(4)], rollout=[refusal, [group("p")]])
    client = client_of(service)

    async def story():
        await client.update_weights(4, "folder")
        return await rolled(client, batch_of("p", min_weights_version=2))

    assert run(story()) == ["p"]
    assert service.named("update_weights") == [(Role.TRAINER, 4, "folder", ""), (Role.TRAINER, 4, "folder", "d")]
    assert [sent.min_weights_version for _, sent, *_ in service.named("rollout")] == [4, 4]
    service = Service(update_weights=[loaded(4)], rollout=[refusal])
    client = client_of(service)

    async def other():
        await client.update_weights(4, "folder")
        await rolled(client, batch_of("p", weights_version=3))

    with pytest.raises(RolloutRejected, match="old"):
        run(other())
    assert len(service.named("update_weights")) == 1, "the batch asks for others"


@pytest.mark.parametrize(("served", "wanted", "goes_on"), [(6, None, True), (3, None, False), (6, 4, False)])
def test_a_batch_goes_on_if_another_client_has_given_a_restarted_service_later_weights(served, wanted, goes_on):
    refusal = [Rejected(reason="old", by=RejectedBy.WEIGHTS)]
    overtaken = Rejected(reason="weights version 4 is below 6; versions only grow")
    service = Service(
        update_weights=[loaded(4), overtaken],
        rollout=[refusal, [group("p")]],
        status=[SimpleNamespace(weights_version=served)],
    )
    client = client_of(service)

    async def story():
        await client.update_weights(4, "folder")
        return await rolled(client, batch_of("p", weights_version=wanted))

    if goes_on:
        assert run(story()) == ["p"]
        return
    with pytest.raises(WeightsRejected, match="below 6"):
        run(story())


def test_the_last_source_of_a_version_is_loaded_again_and_without_an_update_no_version_is_demanded():
    refusal = [Rejected(reason="old", by=RejectedBy.WEIGHTS)]
    service = Service(update_weights=[loaded(4), loaded(4, "e")], rollout=[[group("p")], refusal, [group("p")]])
    client = client_of(service)

    async def story():
        await rolled(client, batch_of("p"))
        for folder in ("one", "other"):
            await client.update_weights(4, folder)
        await rolled(client, batch_of("p"))

    run(story())
    assert service.named("update_weights")[2:] == [(Role.TRAINER, 4, "other", "e")]
    assert [sent.min_weights_version for _, sent, *_ in service.named("rollout")] == [0, 4, 4]


def test_a_batch_may_ask_for_newer_weights_than_the_client_s():
    service = Service(rollout=[[group("p")]])
    run(rolled(client_of(service), batch_of("p", min_weights_version=7)))
    assert [sent.min_weights_version for _, sent, *_ in service.named("rollout")] == [7]


def test_a_batch_that_asks_for_newer_weights_than_the_client_can_load_is_refused_at_once():
    service = Service(update_weights=[loaded(5)], rollout=[[Rejected(reason="old", by=RejectedBy.WEIGHTS)]])
    client = client_of(service)

    async def story():
        await client.update_weights(5, "folder")
        with pytest.raises(RolloutRejected, match="old"):
            await rolled(client, batch_of("p", min_weights_version=7))
        return asyncio.get_running_loop().time()

    assert run(story()) == 0.0 and len(service.named("update_weights")) == len(service.named("rollout")) == 1


def adapter(name: str, version: int) -> Adapter:
    return Adapter(name, version, "0" * 16, f"/adapters/{name}")


def adapted(*names: str | None) -> RolloutBatch:
    groups = [PromptGroup(prompt_id=f"p{n}", token_ids=(1,), adapter=name) for n, name in enumerate(names)]
    return RolloutBatch(batch_id="b", groups=tuple(groups))


@pytest.mark.parametrize(
    ("held", "names", "loads"),
    [
        ((), ("poet",), ["poet"]),
        ((adapter("poet", 1),), ("poet", None), ["poet"]),
        ((adapter("poet", 2),), ("poet",), []),
        ((adapter("other", 1),), ("poet", "other"), ["poet"]),
    ],
)
def test_adapters_of_this_client_are_loaded_again_where_the_service_lacks_them(held, names, loads):
    status = SimpleNamespace(adapters=held)
    last = [group(f"p{number}") for number in range(len(names))]
    refusal = [Rejected(reason="unknown", by=RejectedBy.ADAPTER)]
    service = Service(load_adapter=[adapter("poet", 2)], status=[status], rollout=[refusal, last])
    client = client_of(service)

    async def story():
        await client.load_adapter("poet", "/adapters/poet")
        return await rolled(client, adapted(*names))

    assert len(run(story())) == len(names)
    assert [name for _, name, _ in service.named("load_adapter")[1:]] == loads
    assert [sent.min_adapter_versions for _, sent, *_ in service.named("rollout")] == [{"poet": 2}] * 2


@pytest.mark.parametrize("names", [("other",), ("poet", "other")])
def test_an_adapter_that_nobody_here_has_loaded_is_an_error_and_nothing_is_loaded(names):
    refusal = [Rejected(reason="unknown", by=RejectedBy.ADAPTER)]
    status = SimpleNamespace(adapters=())
    service = Service(load_adapter=[adapter("poet", 2)], status=[status], rollout=[refusal], unload_adapter=[None])
    client = client_of(service)

    async def story():
        await client.load_adapter("poet", "/adapters/poet")
        with pytest.raises(UnknownAdapter, match="unknown"):
            await rolled(client, adapted(*names))
        assert len(service.named("load_adapter")) == len(service.named("rollout")) == 1, "refused at once"
        await client.unload_adapter("poet")
        with pytest.raises(UnknownAdapter, match="unknown"):
            await rolled(client, adapted("poet"))
        assert len(service.named("load_adapter")) == 1, "it was unloaded"

    run(story())


def test_a_first_version_is_loaded_again_too_and_a_client_without_adapters_loads_and_asks_nothing():
    refusal, last = [Rejected(reason="unknown", by=RejectedBy.ADAPTER)], [group("p0")]
    status = SimpleNamespace(adapters=())
    service = Service(load_adapter=[adapter("poet", 1)], status=[status], rollout=[refusal, last])
    client = client_of(service)

    async def story():
        await client.load_adapter("poet", "/adapters/poet")
        return await rolled(client, adapted("poet"))

    assert run(story()) == ["p0"] and len(service.named("load_adapter")) == 2
    service = Service(status=[SimpleNamespace(adapters=(adapter("poet", 1),))], rollout=[refusal, last])
    with pytest.raises(UnknownAdapter, match="unknown"):
        run(rolled(client_of(service), adapted("poet")))
    assert service.named("status") == [] and len(service.named("rollout")) == 1


@pytest.mark.parametrize(
    ("again", "asked", "rollouts"),
    [(2, {"poet": 3}, 1), (1, {"poet": 2}, 1), (1, {}, 2), (3, {"poet": 3}, 2), (2, {"other": 2}, 1)],
)
def test_an_adapter_is_refused_at_once_if_the_service_has_it_in_a_lower_version_than_asked_for(again, asked, rollouts):
    """`again`: version that the service, which was restarted, gives the client's adapter when it is loaded again."""
    refusal, last = [Rejected(reason="old", by=RejectedBy.ADAPTER)], [group("p0"), group("p1")]
    held = SimpleNamespace(adapters=(adapter("other", 1),))
    loads = [adapter("poet", 2), adapter("poet", again)]
    service = Service(load_adapter=loads, status=[held], rollout=[refusal, last])
    client = client_of(service)

    async def story():
        await client.load_adapter("poet", "/adapters/poet")
        batch = adapted("poet", "other").model_copy(update={"min_adapter_versions": asked})
        if rollouts == 2:
            assert await rolled(client, batch) == ["p0", "p1"]
        else:
            with pytest.raises(UnknownAdapter, match="old"):
                await rolled(client, batch)

    run(story())
    assert len(service.named("rollout")) == rollouts and len(service.named("load_adapter")) == 2


def test_versions_of_adapters_that_a_batch_asks_for_may_be_higher():
    service = Service(load_adapter=[adapter("poet", 2)], rollout=[[group("p0")]])
    client = client_of(service)

    async def story():
        await client.load_adapter("poet", "/adapters/poet")
        for versions in ({"poet": 1, "other": 5}, {"poet": 9}):
            await rolled(client, adapted("poet").model_copy(update={"min_adapter_versions": versions}))

    run(story())
    sent = [sent.min_adapter_versions for _, sent, *_ in service.named("rollout")]
    assert sent == [{"poet": 2, "other": 5}, {"poet": 9}]


# ---- traces ---------------------------------------------------------------------------------------------

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_the_spans_of_a_batch_are_kept_where_it_says_so_and_taken_once():
    service = Service(rollout=[[group("p")]], take_spans=[[{"name": "of the service"}]])
    client = client_of(service)

    async def story():
        await rolled(client, batch_of("p", keep_trace=True))
        await rolled(client, batch_of("p", batch_id="c"))
        spans = await client.take_trace("b")
        with pytest.raises(KeyError):
            await client.take_trace("b")
        with pytest.raises(KeyError):
            await client.take_trace("c")
        return spans

    spans = run(story())
    assert spans[-1] == {"name": "of the service"} and len(spans) == 2
    (sent, _) = (sent for _, sent, *_ in service.named("rollout"))
    ((_, trace_id),) = service.named("take_spans")
    assert sent.traceparent.split("-")[1] == trace_id and len(trace_id) == 32


def test_the_traces_of_the_newest_batches_are_kept(monkeypatch):
    monkeypatch.setattr(driver_spans, "MAX_TRACES", 2)
    service = Service(rollout=[[group("p")]], take_spans=[[]])
    driver = client_of(service)

    async def story():
        for name in "abc":
            await rolled(driver, batch_of("p", batch_id=name, keep_trace=True))
        with pytest.raises(KeyError):
            await driver.take_trace("a")
        for name in "bc":
            await driver.take_trace(name)

    run(story())


def test_a_batch_keeps_the_parent_of_its_trace():
    service = Service(rollout=[[group("p")]])
    client = client_of(service)
    run(rolled(client, batch_of("p", traceparent=PARENT)))
    run(rolled(client, batch_of("p", traceparent=PARENT, keep_trace=True)))
    first, second = (sent.traceparent for _, sent, *_ in service.named("rollout"))
    assert first.split("-")[1] == second.split("-")[1] == "ab" * 16


# ---- streams of news ------------------------------------------------------------------------------------


def test_a_watch_goes_on_from_the_last_item_and_a_refusal_ends_it():
    def item(epoch, number):
        return f'{{"epoch": "{epoch}", "number": {number}}}'

    service = Service(watch=[[item("e", 1), item("e", 2)], [item("f", 1)], [Rejected(reason="too many watch")]])

    async def story():
        seen = []
        with pytest.raises(RolloutRejected, match=r"^too many watch$"):
            async for delta in client_of(service).watch():
                seen.append((delta["epoch"], delta["number"]))
        return seen

    assert run(story()) == [("e", 1), ("e", 2), ("f", 1)]
    assert service.named("watch") == [(Role.TRAINER, "", 0), (Role.TRAINER, "e", 2), (Role.TRAINER, "f", 1)]
    assert all(call.cancels == 1 for call in service.calls)
    service.answers["watch"] = [[Rejected(reason="observers may not", by=RejectedBy.ROLE)]]
    with pytest.raises(PermissionError, match="observers may not"):
        run(story())


def test_changes_of_replicas_are_followed_until_the_iterator_is_dropped():
    service = Service(replica_changes=[["first", "second", "third"]])

    async def story():
        changes = client_of(service).replica_changes()
        assert [await anext(changes), await anext(changes)] == ["first", "second"]
        assert service.calls[0].cancels == 0
        await changes.aclose()
        assert service.calls[0].cancels == 1

    run(story())


def test_a_journal_is_renewed_while_it_is_on():
    service = Service(journal=[None, "so far", "whole"], renew_journal=[None])

    async def story():
        client = client_of(service)
        await client.journal(True)
        (first,) = service.hearts
        first.beat()
        assert await client.journal(True) == "so far" and first.stopped
        second = service.hearts[1]
        assert await client.journal(False) == "whole" and second.stopped and len(service.hearts) == 2

    run(story())
    assert service.named("journal") == [(Role.TRAINER, on) for on in (True, True, False)]
    assert service.named("renew_journal") == [(Role.TRAINER,)]


# ---- texts ----------------------------------------------------------------------------------------------


def test_texts_are_decoded_with_the_service_s_tokenizer_which_is_sent_once_and_only_where_it_is_not_here(monkeypatch):
    made, asked = [], []
    monkeypatch.setattr(result_texts, "tokenizer_files", lambda folder: {"tokenizer.json": b"here"})
    monkeypatch.setattr(result_texts, "name_of_tokenizer", lambda files: f"of {files['tokenizer.json'].decode()}")
    monkeypatch.setattr(result_texts, "TextDecoder", lambda *given: made.append(given) or f"decoder {len(made)}")

    async def ask(method):
        asked.append(method)
        return "/model" if method == "model_folder" else {"tokenizer.json": b"there"}

    class Sample:
        def __init__(self, tokenizer):
            self.tokenizer, self.decoder = tokenizer, None

        def decode_by(self, decoder):
            self.decoder = decoder

    async def story():
        texts = ResultTexts(ask)
        samples = [Sample("of here"), Sample("of there"), Sample("of there"), Sample(None)]
        await texts.attach(SimpleNamespace(samples=samples))
        await texts.attach(SimpleNamespace(samples=[samples[0]]))
        return [one.decoder for one in samples]

    assert run(story()) == ["decoder 1", "decoder 2", "decoder 2", None]
    assert made == [("of here", "/model", {}), ("of there", "/model", {"tokenizer.json": b"there"})]
    assert asked == ["model_folder", "model_folder", "tokenizer_files"]


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": b"there", "a/config.json": b"{}"}])
def test_a_decoder_loads_its_tokenizer_once_and_of_the_right_files(monkeypatch, files):
    loaded = []

    class Loaded:
        def __init__(self, folder: str, number: int):
            loaded.append((folder, number, {path.name: path.read_bytes() for path in Path(folder).glob("*")}))

        def decode(self, token_ids) -> str:
            return "".join(map(chr, token_ids))

    monkeypatch.setattr(prompts, "Prompts", Loaded)
    monkeypatch.setattr(result_texts, "name_of_tokenizer", lambda files: "there")
    monkeypatch.setattr(result_texts, "text_of", lambda token_ids, rule, decode: (decode(token_ids), rule))
    decoder = result_texts.TextDecoder("there", "/no/model", files)
    assert decoder((97, 98), "rule") == ("ab", "rule") and decoder((99,), "rule") == ("c", "rule")
    ((folder, number, content),) = loaded
    assert number == 0 and (folder == "/no/model") is not bool(files)
    assert content == {Path(name).name: data for name, data in files.items()}
    if files:
        with pytest.raises(LookupError, match="/no/model: its tokenizer is not the one of these tokens any more"):
            result_texts.TextDecoder("another", "/no/model", files)((97,), "rule")
