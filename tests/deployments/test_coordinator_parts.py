"""Parts of the coordinator, each with stand-ins for engines: the loop, commands to all replicas, replicas wanted."""

import asyncio
import os
import resource
import signal
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.constraints import form_check
from tailrace.deployments.constraints.form_check import TOO_LARGE
from tailrace.deployments.coordinator.adapter_loads import AdapterLoads
from tailrace.deployments.coordinator.admission import Admission
from tailrace.deployments.coordinator.loop import Loop
from tailrace.deployments.coordinator.replica_target import ReplicaTarget
from tailrace.deployments.coordinator.sleep import Sleep
from tailrace.deployments.coordinator.weight_transfer import WeightTransfer
from tailrace.deployments.coordinator.weights_check import weights_check
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import KV_CACHE, TAGS, WEIGHTS, WeightsRead
from tailrace.deployments.messages.command import ForgetAdapter, LoadAdapter, NameAdapter, WakeKv
from tailrace.deployments.messages.errors import ChunkError
from tailrace.deployments.messages.rollout import Rejected, SamplingParams
from tailrace.policies.protocol.actions import SetReplicas
from tailrace.policies.protocol.events import ReplicasReserved


class Replicas:
    """Engines by name, each with its answer to every command, or the error that it raises."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    async def ask(self, name, command):
        self.asked.append((name, command))
        if isinstance(self.answers[name], Exception):
            raise self.answers[name]
        return self.answers[name]

    async def ask_all(self, command, timeout_s=10.0):
        self.asked.append(command)
        return list(self.answers.values())

    async def digests(self, command):
        self.asked.append(command)
        return set(self.answers.values())


# ---- sleep ---------------------------------------------------------------------------------------------


def test_kv_is_woken_by_one_call_at_a_time_and_again_after_an_error():
    async def story():
        asked, answer = [], asyncio.Event()

        async def ask(name, command):
            asked.append((name, command))
            await answer.wait()
            raise ChunkError("no memory")

        sleep = Sleep(None, SimpleNamespace(ask=ask), None, SimpleNamespace(asleep=False), None)
        reports = [SimpleNamespace(replica_id="a", asleep=(KV_CACHE,)), SimpleNamespace(replica_id="b", asleep=())]

        def look():
            return [asyncio.ensure_future(call) for call in sleep.look(reports, first=False)]

        calls = look()
        await asyncio.sleep(0)
        calls += look()  # the report is from before the first call's end
        await asyncio.sleep(0)
        assert asked == [("a", WakeKv())]
        answer.set()
        await asyncio.gather(*calls)
        await asyncio.gather(*look())
        assert asked == [("a", WakeKv())] * 2

    asyncio.run(story())


async def looked() -> None:
    """The replicas' reports have been read."""


class Paused:
    """Admission over a core with samples in flight, whose loop turns whenever it is waited for."""

    def __init__(self, in_flight: int):
        self.in_flight, self.weights = in_flight, SimpleNamespace(held=False)
        self.admission = Admission(
            loop=SimpleNamespace(turn=lambda: asyncio.sleep(0), look_soon=lambda: None, now=lambda: 0.0),
            core_holder=SimpleNamespace(in_flight=lambda: self.in_flight, due=False),
            registry=SimpleNamespace(rejoin=lambda *_: ()),
            weights=self.weights,
            batches=(),
            runner=SimpleNamespace(calls={}),
            cancel_all=lambda: None,
        )

    async def begun(self, mode: str) -> asyncio.Task:
        """Returns a call of `pause` that waits, or has returned."""
        pause = asyncio.ensure_future(self.admission.pause(mode))
        for _ in range(5):
            await asyncio.sleep(0)
        return pause


# ---- the loop ------------------------------------------------------------------------------------------


def test_the_clock_counts_from_the_loop_s_beginning():
    async def story():
        clock = asyncio.get_running_loop()
        before = clock.time()
        loop = Loop(asyncio.Event())
        assert loop.began_s >= before and 0.0 <= loop.now() <= clock.time() - before

    asyncio.run(story())


def test_events_are_taken_once_and_wake_the_loop():
    async def story():
        loop, event = Loop(asyncio.Event()), ReplicasReserved(0.0, 2)
        waiting = asyncio.ensure_future(loop.woken(60.0))
        loop.tell(event)
        await waiting
        assert len(loop) == 1 and loop.take() == [(event, None)] and loop.take() == [] and len(loop) == 0
        await loop.woken(0.0)  # nobody wakes it: it returns in its time

    asyncio.run(story())


def test_those_that_wait_for_a_turn_or_a_look_are_woken_by_the_next_one_alone():
    async def story():
        loop = Loop(asyncio.Event())
        loop.turn_ends()
        loop.look_ends()
        turn, look = asyncio.ensure_future(loop.turn()), asyncio.ensure_future(loop.look())
        await asyncio.sleep(0)
        assert not turn.done() and not look.done()
        loop.turn_ends()
        await turn
        assert not look.done()
        loop.look_ends()
        await look

    asyncio.run(story())


def test_a_task_is_kept_until_it_ends_and_a_report_is_waited_for():
    async def story():
        reported = asyncio.Event()
        loop = Loop(reported)
        task = loop.spawn(loop.reported(60.0))
        await asyncio.sleep(0)
        assert loop.tasks == {task}
        loop.look_soon()
        await task
        await asyncio.sleep(0)
        assert not loop.tasks and not reported.is_set()

    asyncio.run(story())


# ---- prompts -------------------------------------------------------------------------------------------


def test_a_form_of_answers_that_cannot_be_made_refuses_the_prompt_with_all_stop_tokens_named():
    asked = []
    prompts = object.__new__(Prompts)
    refusal = lambda form, stops: asked.append((form, stops)) or "no such form"  # noqa: E731
    prompts.__dict__ |= {"_forms": SimpleNamespace(refusal=refusal), "_vocabulary": 100, "_ends": frozenset({9, 2})}
    form = {"regex": "a+"}
    sampling = SamplingParams(structured_outputs=form, stop_token_ids=(5, 2))
    assert prompts._find_rules_refusal(sampling) == "no such form"
    assert asked == [(sampling.structured_outputs, [2, 5, 9])]
    assert prompts._find_rules_refusal(SamplingParams()) is None and len(asked) == 1


def test_a_form_whose_check_has_ended_is_checked_again(monkeypatch, tmp_path):
    """The end of the checking process was remembered as the form's refusal."""
    prompts = object.__new__(Prompts)
    prompts.__dict__ |= {"model": "m", "_vocabulary": 100, "_ends": frozenset({9})}
    sampling = SamplingParams(structured_outputs={"regex": "a+"})
    monkeypatch.setattr(sys, "executable", "false")  # starts in place of Python, and ends
    with pytest.raises(ValueError, match=r"structured_outputs: the process that checks forms has ended \(1\); send"):
        prompts._rules_refusal(sampling)
    answering = tmp_path / "answering"
    answering.write_text("#!/bin/sh\nread line && echo null\n")
    answering.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(answering))
    assert prompts._rules_refusal(sampling) is None
    prompts._forms.close()


@pytest.mark.parametrize(("by", "found"), [(signal.SIGKILL, None), (signal.SIGPROF, TOO_LARGE)])
def test_a_form_whose_check_was_killed_is_not_too_large(monkeypatch, by, found):
    """A node without memory may kill it, for no fault of the form's; its own limits end it in other ways."""
    compiler = SimpleNamespace(start=lambda form, stops: os.kill(os.getpid(), by))
    monkeypatch.setattr(form_check, "form_refusal", lambda form: None)
    with nullcontext() if found else pytest.raises(SystemExit):
        answer = form_check._in_fork(compiler, {"form": {"regex": "a"}, "stops": []}, 5.0, resource.RLIM_INFINITY)
        assert answer == found


# ---- commands to all replicas ----------------------------------------------------------------------------


def test_a_pause_that_waits_returns_at_once_in_a_paused_service():
    async def story():
        paused = Paused(in_flight=2)
        assert (await paused.begun("keep")).done() and paused.admission.held
        assert (await paused.begun("wait")).done(), "nothing that is in flight can end"
        assert paused.admission.held
        paused.admission.resume()
        assert not paused.admission.is_paused

    asyncio.run(story())


def test_a_pause_whose_caller_leaves_holds_nothing_up():
    async def story():
        paused = Paused(in_flight=2)
        first, second = await paused.begun("wait"), await paused.begun("wait")
        waits = asyncio.ensure_future(paused.admission.admitted("b", lambda: False))
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert paused.admission.waiting == ("b",) and not first.done(), "the first one waits on"
        first.cancel()
        await asyncio.wait_for(waits, 10.0)
        assert not paused.admission.is_paused and not paused.admission.waiting

    asyncio.run(story())


def test_an_adapter_is_loaded_named_and_forgotten_on_every_replica():
    engines = Replicas(a="digest", b="digest")
    loads = AdapterLoads(engines, "model", looked)

    async def story():
        adapter = await loads.load("poet", "/poet")
        assert (adapter.name, adapter.digest, adapter.path) == ("poet", "digest", "/poet")
        assert engines.asked == [LoadAdapter("/poet"), NameAdapter(adapter)]
        assert await loads.unload("poet") is None
        assert engines.asked[2:] == [ForgetAdapter("poet")]
        assert (await loads.unload("poet")).reason == "adapter 'poet' is not loaded"

    asyncio.run(story())


def test_a_new_coordinator_looks_at_its_replicas_before_it_loads_or_unloads_an_adapter():
    async def story():
        seen = asyncio.Event()
        loads = AdapterLoads(Replicas(a="new"), "model", seen.wait)
        unload = asyncio.ensure_future(loads.unload("poet"))
        load = asyncio.ensure_future(loads.load("other", "/other"))
        await asyncio.sleep(0)
        known = [Adapter("poet", 3, "digest", "/poet"), Adapter("other", 4, "old", "/other")]
        assert loads.observe([SimpleNamespace(adapters=known)]) == []
        seen.set()
        assert await unload is None and loads.book.get("poet") is None
        assert (await load).version == 5

    asyncio.run(story())


def test_a_new_coordinator_looks_at_its_replicas_before_it_resumes_a_service_that_may_sleep():
    async def story():
        loop, paused = Loop(asyncio.Event()), Paused(in_flight=0)
        paused.weights.asleep = False
        sleep = Sleep(loop, None, None, paused.weights, paused.admission)
        resume = asyncio.ensure_future(sleep.resume())
        await asyncio.sleep(0)
        assert sleep.look([SimpleNamespace(replica_id="a", asleep=(WEIGHTS,), steps=9)], first=True) == []
        loop.looked.set()
        assert (await resume).reason == "the service sleeps; wake it up" and paused.admission.held

    asyncio.run(story())


class Sleeping:
    """A service without replicas, whose sleeps wait for samples in flight, and whose loads for `load`."""

    def __init__(self):
        loop, self.paused, self.load = Loop(asyncio.Event()), Paused(in_flight=1), asyncio.Event()
        loop.looked.set()
        self.paused.weights.asleep, self.paused.weights.loaded = False, self.load.wait
        registry = SimpleNamespace(reports={})
        self.sleep = Sleep(loop, Replicas(), registry, self.paused.weights, self.paused.admission)

    async def calls(self, *calls) -> list[asyncio.Task]:
        """Returns the calls, each begun once the one before waits."""
        begun = []
        for call in calls:
            begun.append(asyncio.ensure_future(call))
            await asyncio.sleep(0)
        return begun


@pytest.mark.parametrize("tags", [TAGS, (KV_CACHE,)])
def test_a_wake_up_during_the_pause_of_a_sleep_is_not_undone_by_it(tags):
    async def story():
        service = Sleeping()
        slept, woken = await service.calls(service.sleep.begin("wait"), service.sleep.end(tags))
        assert (await slept).reason == "the service was woken before it slept" and await woken is None
        assert service.sleep.tags == () and not service.paused.admission.is_paused
        slept, woken, again = await service.calls(
            service.sleep.begin("wait"), service.sleep.end(tags), service.sleep.begin("keep")
        )
        assert (await slept).reason == "the service was woken before it slept"
        assert await woken is None and await again is None and service.sleep.tags == TAGS

    asyncio.run(asyncio.wait_for(story(), 10.0))


def test_a_pause_after_a_sleep_was_woken_stays_a_pause():
    async def story():
        service = Sleeping()
        slept, _, _ = await service.calls(
            service.sleep.begin("wait"), service.sleep.end(TAGS), service.paused.admission.pause("keep")
        )
        assert (await slept).reason == "the service was woken before it slept"
        assert service.sleep.tags == () and service.paused.admission.held
        assert await service.sleep.end(TAGS) is None and service.paused.admission.held

    asyncio.run(asyncio.wait_for(story(), 10.0))


def test_a_sleep_that_comes_while_the_weights_wake_is_not_undone_by_the_wake_up():
    async def story():
        service = Sleeping()
        assert await service.sleep.begin("keep") is None
        woken, slept = await service.calls(service.sleep.end(TAGS), service.sleep.begin("keep"))
        service.load.set()
        assert (await woken).reason == "the service was put to sleep again before it woke"
        assert await slept is None and service.sleep.tags == TAGS and service.paused.admission.held

    asyncio.run(asyncio.wait_for(story(), 10.0))


def test_replicas_that_read_other_contents_of_an_adapter_are_refused():
    async def story():
        refused = await AdapterLoads(Replicas(a="one", b="two"), "model", looked).load("poet", "/poet")
        assert refused.reason == "adapter 'poet': /poet: replicas read other contents: ['one', 'two']"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("", "/a", "adapter name is ''"),
        ("x" * 500, "/a", "give 1 to"),
        ("a\n", "/a", "printable"),
        (3, "/a", "adapter name is '3'"),
        ("model", "/a", "model"),
        ("poet", "folder", "its folder is 'folder'; give an absolute path"),
        ("poet", 5, "its folder is 5; give an absolute path"),
    ],
)
def test_a_bad_adapter_is_refused_before_a_replica_is_asked(name, path, said):
    engines = Replicas()
    refused = asyncio.run(AdapterLoads(engines, "/models/model", looked).load(name, path))
    assert isinstance(refused, Rejected) and said in refused.reason and not engines.asked


def read(version=3, digest="d", unlike=(), problem="", **checksums) -> WeightsRead:
    return WeightsRead(version, digest, checksums or {"w": "1", "v": "2"}, unlike, problem)


def checked(**answers):
    return asyncio.run(weights_check(Replicas(**answers), sorted(answers)))


def test_weights_read_back_are_compared_with_those_of_the_first_replica_and_with_their_source():
    found = checked(a=read(), b=read(w="1", v="9"), c=read(unlike=("w",)), d=read(w="1"))
    assert found.replicas == ("a", "b", "c", "d") and (found.version, found.digest) == (3, "d")
    assert found.unlike == {"b": ("v",), "c": ("w",), "d": ("v",)} and found.problems == {}
    assert checked(a=read(problem="gone", unlike=None)).problems == {"a": "gone"}


def test_weights_that_cannot_be_read_or_change_meanwhile_are_refused():
    assert checked().reason == "no replica is up: there are no weights to read"
    assert checked(a=read(), b=ChunkError("out of memory")).reason == "b: its weights were not read: out of memory"
    for other in (read(version=4), read(digest="e")):
        assert checked(a=read(), b=other).reason == "the weights were updated meanwhile; ask again"


def transferred(**answers):
    info = {"packed": True}
    reports = {name: SimpleNamespace(node_id="n", weight_transfer="ipc") for name in answers}
    transfer = WeightTransfer(Replicas(**answers), lambda: reports, lambda: (4, "digest"))
    return asyncio.run(transfer.run("init", info))


def test_a_transfer_names_the_replica_that_failed_and_sources_that_differ():
    failed = transferred(a="", b=RuntimeError("out of memory"))
    assert failed.reason == "init of a weight transfer failed on b: RuntimeError: out of memory"
    assert "received different weights: one, two" in transferred(a="one", b="two").reason
    assert transferred(a="one", b="") == "one"


# ---- replicas that are wanted ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "up", "aside", "engines"),
    [(3, 2, 1, 3), (1, 2, 1, 2), (2, 2, 1, 3), (1, 1, 1, 2), (3, 1, 1, 3), (0, 2, 1, 0), (1, 2, 0, 1)],
)
def test_serve_stops_none_for_one_that_is_set_aside(wanted, up, aside, engines):
    async def story():
        target = ReplicaTarget()
        target.want(SetReplicas(wanted, "the tail"))
        target.see(up, aside)
        assert (target.metrics()["Engine"], target.wanted) == (engines, wanted)

    asyncio.run(story())


def test_a_follower_hears_the_present_number_of_replicas_first_and_each_change_once():
    async def story():
        target = ReplicaTarget()
        assert target.metrics() == {}
        changes = target.changes()
        first = await anext(changes)
        assert (first.replicas, first.wanted, first.reason) == (0, 0, "")
        target.see(2)
        second = await anext(changes)
        assert (second.replicas, second.wanted) == (2, 2)
        waiting = asyncio.ensure_future(anext(changes))
        target.see(2)  # no change
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        target.want(SetReplicas(1, "the tail", 3))
        third = await waiting
        assert (third.replicas, third.wanted, third.reason) == (2, 1, "the tail")
        assert target.metrics() == {"Engine": 1.0, "Drafter": 3.0}
        await changes.aclose()

    asyncio.run(story())
