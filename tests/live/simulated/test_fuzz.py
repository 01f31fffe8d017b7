"""The live shell in simulation: seeds with all faults, and that the simulation finds the defects that it is for."""

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from ray.exceptions import OutOfMemoryError

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import QuotaExceeded
from tailrace.app.cli import main
from tailrace.deployments.batches import deliveries
from tailrace.deployments.batches.open_batch import GroupIdentity
from tailrace.deployments.batches.open_sessions import OpenSessions
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.batches.token_log import TokenLog
from tailrace.deployments.channel.numbered import NumberedEnd
from tailrace.deployments.coordinator import chunk_runner, chunk_watch
from tailrace.deployments.coordinator.kv_pool_manager import KvPoolManager
from tailrace.deployments.coordinator.rollouts import Rollouts
from tailrace.deployments.engine.engine_loop import EngineLoop
from tailrace.deployments.engine.suspects import Suspects
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, Rejected, RejectedBy, RolloutBatch
from tailrace.deployments.telemetry import Telemetry
from tailrace.lab.commands.fuzz import _kinds
from tailrace.lab.fuzz import replica, stepper
from tailrace.lab.fuzz.campaign import campaign, outcome_of, shortened
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.faults import KINDS
from tailrace.lab.fuzz.log_disk import LogDisk
from tailrace.lab.fuzz.odd.engine_faults import OF_ENGINES
from tailrace.lab.fuzz.odd.plan import ODDITIES
from tailrace.lab.fuzz.run import Outcome, end_of, plan_of, run
from tailrace.lab.fuzz.virtual_time import VirtualLoop
from tailrace.lab.fuzz.worlds.plan import ALWAYS, WORLDS
from tailrace.policies.core import failures, unassigned
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.events import ReplicasReserved

SEEDS = (
    *(1000, 1001, 1003, 1004, 1005, 1006, 1007, 1008, 1010, 1012),
    *(1013, 1019, 1021, 1023, 1025, 1027, 1034, 1041, 1047, 1051),
)
"""Each kind of fault is in one of them; `--long` tries twenty times as many."""

KEPT = {
    20: "a call across a partition",
    106: "a new coordinator judged weights before it had heard of a replica",
    1049: "a sample was given up for failures of its replica",
    1132: "a context shard's call was cancelled",
    10191: "an update that no replica had read stood for ever",
    1143: "all replicas refused for two minutes",
    101216: "a sample was given up for replicas that were gone before they took its chunk",
    103835: "a replica was set aside for a failure of a sample that has succeeded since",
    101649: "a repeated update was of other weights",
}
"""Seeds that have found a defect once."""

KEPT_NEWER = {740082: "an only sample was given up while its only replica refused for two minutes"}
"""Such seeds since all kinds of faults but pauses are there."""

KEPT_WITH_PAUSES = {
    1003222: "a replica that had been silent for long went on with a chunk that had ended elsewhere",
    1011043: "a sample was given up after four dead replicas and one refused answer",
}
"""Such seeds since pauses are there, too."""

KINDS_OF_THEN = tuple(one for kind in KINDS for one in ((kind, "shards") if kind == "shard_dies" else (kind,)))
"""The kinds of faults while the number of shards could change; `no_shards` lets that fault do nothing."""

KEPT_KINDS_WITH_SHARDS = tuple(kind for kind in KINDS_OF_THEN if kind != "deadly")
KEPT_KINDS_WITH_LINES = tuple(kind for kind in KEPT_KINDS_WITH_SHARDS if kind not in ("shards", "shard_dies"))
KEPT_KINDS_WITH_PAUSES = tuple(kind for kind in KEPT_KINDS_WITH_LINES if kind != "line_breaks")
KEPT_NEWER_KINDS = tuple(kind for kind in KEPT_KINDS_WITH_PAUSES if kind != "pause")
KEPT_KINDS = tuple(kind for kind in KEPT_NEWER_KINDS if kind not in ("swallow", "policy", "strange_batch"))
"""The kinds of faults at the time of `KEPT`: a seed's schedule depends on them."""


def test_no_seed_fails():
    outcomes = [outcome_of(seed, (*KINDS, *ODDITIES, *WORLDS)) for seed in SEEDS]
    assert {outcome.seed: outcome.problem for outcome in outcomes if outcome.problem} == {}
    assert sum(outcome.samples for outcome in outcomes) > 100 * len(SEEDS)
    assert {fault.kind for outcome in outcomes for fault in outcome.faults} == {*KINDS, *OF_ENGINES}


@pytest.mark.long
def test_no_seed_fails_at_length():
    outcomes = campaign(sorted({*range(1000, 1420)} - {*SEEDS}), (*KINDS, *ODDITIES, *WORLDS))
    assert {outcome.seed: outcome.problem for outcome in outcomes if outcome.problem} == {}


@pytest.mark.parametrize("seed", KEPT)
def test_a_defect_that_was_mended_stays_mended(seed):
    assert outcome_of(seed, KEPT_KINDS, singles=0.0).problem is None


@pytest.mark.parametrize("seed", KEPT_WITH_PAUSES)
def test_a_defect_under_faults_and_pauses_stays_mended(seed):
    assert outcome_of(seed, KEPT_KINDS_WITH_PAUSES).problem is None


KEPT_WITH_LINES = {
    2000033: "a new coordinator took an adapter's older content from replicas that it heard late",
    2011694: "a batch that a new coordinator refused for its adapter, which it had not heard of, lost its token log",
}
"""Such seeds since replicas have lines."""


@pytest.mark.parametrize("seed", KEPT_WITH_LINES)
def test_a_defect_under_faults_of_lines_too_stays_mended(seed):
    assert outcome_of(seed, KEPT_KINDS_WITH_LINES).problem is None


KEPT_WITH_SHARDS = {7023317: "a sample was given up for five losses of three replicas, two of which came back"}
"""Such seeds since group contexts have shards."""


@pytest.fixture
def no_shards(monkeypatch):
    async def nothing(*_):
        pass

    monkeypatch.setitem(KINDS, "shards", nothing)


@pytest.mark.parametrize("seed", KEPT_WITH_SHARDS)
def test_a_defect_under_faults_of_shards_too_stays_mended(no_shards, seed):
    assert outcome_of(seed, KEPT_KINDS_WITH_SHARDS).problem is None


KEPT_WITH_EVERYTHING = {
    8045381: "a replica that no wake-up had reached put the service of a new coordinator to sleep",
    8053095: "the simulated trainer took back weights that the service had read for a version, and waited for ever",
    8076227: "tokens of weights that no engine held any more were asked of a service that had begun with older ones",
    8085272: "a sleep and its wake-up came to a new coordinator before any report, which then put the service to sleep",
}
"""Such seeds of all faults that there are now."""


@pytest.mark.parametrize("seed", KEPT_WITH_EVERYTHING)
def test_a_defect_under_all_faults_stays_mended(no_shards, seed):
    assert outcome_of(seed, KINDS_OF_THEN).problem is None


KEPT_WITH_DEADLY = {106: "a sample that ended its engines was queued with its group while another was on trial"}
"""Such seeds since a sample may end its engines, with these faults alone."""


@pytest.mark.parametrize("seed", KEPT_WITH_DEADLY)
def test_a_sample_that_ends_its_engines_takes_no_other_with_it(seed):
    assert outcome_of(seed, ("deadly",)).problem is None


KEPT_WITH_WORLDS = {310840: "a bound sample waited beside room that another sample's kept KV had left"}
"""Such seeds of all that a seed may have."""


@pytest.mark.parametrize("seed", KEPT_WITH_WORLDS)
def test_a_defect_with_worlds_stays_mended(seed):
    assert outcome_of(seed, (*KINDS, *ODDITIES, *WORLDS)).problem is None


KEPT_WITH_LANES = {
    101512: "what waited for an update that was withdrawn ran under the weights before",
    103704: "a new coordinator began samples on replicas that had just started, under the weights before an update",
}
"""Such seeds since each may have lanes."""


@pytest.mark.parametrize("seed", KEPT_WITH_LANES)
def test_a_defect_with_lanes_stays_mended(seed):
    assert outcome_of(seed, (*KINDS, *ODDITIES, *WORLDS, "lanes" + ALWAYS)).problem is None


@pytest.mark.parametrize("seed", [pytest.param(3000, marks=pytest.mark.long), 3003])
def test_connections_that_break_cost_seconds_and_only_because_messages_are_sent_again(seed, monkeypatch):
    plan = plan_of(seed, ("line_breaks",))
    assert len(plan.faults) > 5 and run(plan).seconds < run(replace(plan, faults=())).seconds + 20
    monkeypatch.setattr(NumberedEnd, "resend", lambda end, now_s: None)
    broken = run(plan)
    assert broken.problem is not None or broken.seconds > 500


@pytest.mark.parametrize("seed", KEPT_NEWER)
def test_a_newer_defect_that_was_mended_stays_mended(seed):
    assert outcome_of(seed, KEPT_NEWER_KINDS, singles=0.0).problem is None


def test_the_same_seed_gives_the_same_history():
    one, other = (outcome_of(7, (*KINDS, *ODDITIES)) for _ in range(2))
    assert one == other and one.samples


PRINTS_OUTCOMES = """
from tailrace.lab.fuzz.campaign import _run_all
from tailrace.lab.fuzz.faults import KINDS
from tailrace.lab.fuzz.odd.plan import ODDITIES
for outcome in _run_all((8000012, 8000035, 8000702), (*KINDS, *ODDITIES), "bits"):
    print(outcome.samples, outcome.tokens, outcome.seconds)
"""


def test_the_same_seed_gives_the_same_history_in_any_process():
    """Replicas were held, and tasks of a killed process cancelled, in an order that came from hashes."""
    command = [sys.executable, "-c", PRINTS_OUTCOMES]
    histories = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("0", "2", "4")
    }
    assert len(histories) == 1 and len(histories.pop().splitlines()) == 3


def any_answer(monkeypatch):
    monkeypatch.setattr(chunk_runner, "check_result", lambda *_: None)


def threads_that_live(monkeypatch):
    monkeypatch.setattr(EngineLoop, "overdue_s", 0.0)


def chunks_without_watch(monkeypatch):
    monkeypatch.setattr(chunk_watch, "STALLED_S", 1e9)


def contents_by_version(monkeypatch):
    """As if all contents had one digest."""
    for module in (stepper, replica):
        monkeypatch.setattr(module, "digest_of", lambda content: "the same")


def replicas_without_blame(monkeypatch):
    """As before a replica could be to blame."""
    monkeypatch.setattr(failures, "MAX_SAMPLES", 10**9)
    monkeypatch.setattr(failures, "MAX_DOUBTFUL_ATTEMPTS", failures.MAX_ATTEMPTS)
    monkeypatch.setattr(failures, "SAMPLE_PAUSE_S", (0.0, 0.0))


def replicas_lost_without_trial(monkeypatch):
    """As if each sample had been alone under each replica that left."""
    monkeypatch.setattr(failures._Trials, "lose", lambda self, sample: True)


def errors_that_are_not_contained(monkeypatch):
    def reserve(self, replicas):
        self.loop.tell(ReplicasReserved(self.loop.now(), replicas))

    def restart_core(self, place, error):
        raise error

    monkeypatch.setattr(Rollouts, "reserve", reserve)
    monkeypatch.setattr(Rollouts, "_restart_core", restart_core)


def batches_that_nobody_checks(monkeypatch):
    """Whatever is no batch at all is refused as ever: it would make the coordinator raise."""
    checked = deliveries.checked

    def unchecked(kind, message):
        return message if isinstance(message, kind) else checked(kind, message)

    monkeypatch.setattr(deliveries, "checked", unchecked)


def homes_that_nobody_checks(monkeypatch):
    monkeypatch.setattr(unassigned, "checked_home", lambda policy, home, ready: home)


def a_pool_that_nobody_sweeps(monkeypatch):
    monkeypatch.setattr(KvPoolManager, "rest", lambda self, idle: None)


def tokens_that_are_written_late(monkeypatch):
    async def write_early(self, batches):
        pass

    monkeypatch.setattr(TokenLog, "write_early", write_early)


def tokens_that_are_not_written(monkeypatch):
    async def write(self, batches, version):
        self._complete_under = version

    tokens_that_are_written_late(monkeypatch)
    monkeypatch.setattr(TokenLog, "write", write)


def tokens_that_are_not_read(monkeypatch):
    async def read(self, batch, groups):
        return []

    monkeypatch.setattr(TokenLog, "read", read)


def refusals_that_are_retried(monkeypatch):
    monkeypatch.setattr(chunk_runner, "SampleRefused", type("Never", (Exception,), {}))


def steps_that_end_their_engine(monkeypatch):
    def search(self, going):
        raise RuntimeError("a row without a candidate")

    monkeypatch.setattr(stepper.SimulatedStepper, "_search", search)


def any_chunk_is_blamed(monkeypatch):
    monkeypatch.setattr(Suspects, "raised", lambda self, possible: next(iter(possible)))


def mates_that_lose_their_place(monkeypatch):
    """After a step that raised, mates continue with a token that is not theirs."""
    search = stepper.SimulatedStepper._search

    def search_badly(self, going):
        search(self, going)
        for running in going.values():
            running.tokens = [1 + token % 998 for token in running.tokens]

    monkeypatch.setattr(stepper.SimulatedStepper, "_search", search_badly)


def engines_without_a_probe(monkeypatch):
    """As if a healthy probe passed on a broken engine: its samples are blamed."""
    search = stepper.SimulatedStepper._search

    def search_without_probe(self, going):
        broken, self.broken = self.broken, False
        search(self, going)
        self.broken = broken

    monkeypatch.setattr(stepper.SimulatedStepper, "_search", search_without_probe)


def answers_that_were_cut(monkeypatch):
    """A caller that asks again does not wait for the end of a sample that is being cancelled, and shares it."""

    async def asked_at_once(self, settings, request):
        if isinstance(prepared := self._prompts.prepare_group(request.group), Rejected):
            return prepared
        prepared, session = self._adapters.bound(prepared, settings.min_adapter_versions), self._session(settings)
        if isinstance(prepared, Rejected) or isinstance(session, Rejected):
            return prepared if isinstance(prepared, Rejected) else session
        asked = session.asked.get((GroupIdentity.of(prepared), request.index, request.turn))
        return asked or self._ask(session, settings, prepared, request)

    monkeypatch.setattr(OpenSessions, "_asked", asked_at_once)


def an_admission_that_checks_nothing(monkeypatch):
    monkeypatch.setattr(Prompts, "_refusal", lambda self, group, token_ids: None)


def refusals_that_are_raised(monkeypatch):
    """Each request that would be refused ends in an exception of the coordinator."""

    def raises(call):
        def answer(*arguments):
            if isinstance(found := call(*arguments), Rejected):
                raise ZeroDivisionError(found.reason)
            return found

        return answer

    monkeypatch.setattr(Prompts, "prepare_group", raises(Prompts.prepare_group))
    monkeypatch.setattr(deliveries, "checked", raises(deliveries.checked))


def replicas_that_stay_idle(monkeypatch):
    """The core decides nothing for 40 s of each minute."""
    decide = RolloutCore.decide
    monkeypatch.setattr(RolloutCore, "decide", lambda self, tick: decide(self, tick) if tick.now % 60 > 40 else [])


def calls_that_never_return(monkeypatch):
    async def reset_caches(self):
        await asyncio.Event().wait()

    monkeypatch.setattr(RolloutClient, "reset_caches", reset_caches)


def calls_that_end_as_cancelled(monkeypatch):
    """A client's update ends in Serve's form of a cancelled call, though nobody has cancelled it."""

    async def update_weights(self, *_):
        raise asyncio.CancelledError("Serve's")

    monkeypatch.setattr(RolloutClient, "update_weights", update_weights)


@pytest.mark.parametrize(
    ("broken", "kinds", "first", "problem"),
    [
        (any_answer, ("damaged",), 0, "are not those of weights"),
        (chunks_without_watch, ("swallow",), 1, "have not ended"),
        (threads_that_live, ("hang_for_ever",), 0, "have not ended"),
        (contents_by_version, ("overwrite", "join", "kill"), 59, "of weights"),
        (replicas_without_blame, ("refuse",), 0, "given up"),
        (replicas_lost_without_trial, ("deadly",), 5, "given up"),
        (tokens_that_are_not_written, ("coordinator",), 19, "were not kept"),
        (tokens_that_are_not_read, ("coordinator",), 19, "were not kept"),
        (batches_that_nobody_checks, ("strange_batch",), 0, "was taken"),
        (homes_that_nobody_checks, ("policy",), 3000, "given up"),
        (a_pool_that_nobody_sweeps, ("kill", "coordinator"), 0, "left over in the pool"),
        (errors_that_are_not_contained, ("strange_reserve",), 0, "a loop of the coordinator has ended"),
        (refusals_that_are_retried, ("refused",), 0, "engines ended it, asked for up to"),
        (steps_that_end_their_engine, ("raises",), 0, "ended under a sample"),
        (any_chunk_is_blamed, ("raises",), 0, "an innocent sample ended"),
        (mates_that_lose_their_place, ("raises",), 18, "are not those of weights"),
        (engines_without_a_probe, ("broken",), 17, "an innocent sample ended"),
        (replicas_that_stay_idle, ("slow",), 0, "while a replica was ready and idle"),
        (answers_that_were_cut, ("hasty",), 3, "cancelled without a request"),
        (an_admission_that_checks_nothing, ("impossible",), 1, "was taken by"),
        (refusals_that_are_raised, ("impossible",), 1, "made the coordinator raise ZeroDivisionError"),
        (refusals_that_are_raised, ("strange_batch",), 0, "made the coordinator raise ZeroDivisionError"),
        (calls_that_never_return, ("reset",), 0, "a call of it has not returned"),
        (calls_that_end_as_cancelled, ("slow",), 0, "was cancelled, by nobody"),
    ],
)
def test_the_simulation_finds_the_defect(monkeypatch, broken, kinds, first, problem):
    """Without one of the safeguards, some seed fails: a check that cannot fail would let all of them pass."""
    broken(monkeypatch)
    problems = (outcome_of(seed, kinds).problem for seed in range(first, first + 60))
    assert problem in next(filter(None, problems))


class ShutDisk(LogDisk):
    """A folder of the token log that answers only while it is `open`."""

    def __init__(self, folder: Path):
        super().__init__("sound", folder, Random(0))
        self.open = asyncio.Event()
        self.open.set()

    async def in_thread(self, work, *args):
        await self.open.wait()
        return await super().in_thread(work, *args)


@pytest.mark.parametrize("early", [True, False])
def test_weights_go_only_once_their_tokens_are_on_disk(tmp_path, monkeypatch, early):
    """An update waits for the log; turns wait only for tokens that came late; and all outlive the coordinator."""
    if not early:
        tokens_that_are_written_late(monkeypatch)

    async def story():
        disk = ShutDisk(tmp_path)
        size = replace(
            plan_of(0).size, replicas=2, limits=None, mean_tokens=400, step_tokens=1, step_s=0.1, policies={}
        )
        cluster = SimulatedCluster(size, Random(0), disk)
        group = PromptGroup(prompt_id="p", token_ids=(1, 2), samples=4, max_tokens=200)
        batch = RolloutBatch(batch_id="b", groups=(group,))
        rolling = asyncio.ensure_future(groups_of(driver_client(cluster), batch))
        await asyncio.sleep(5.0)
        disk.open.clear()
        cluster.disk.folders["w1"] = "content-1"
        update = asyncio.ensure_future(driver_client(cluster).update_weights(1, "w1"))
        made = []
        for _ in range(2):
            await asyncio.sleep(4.0)
            made.append(cluster.coordinator.rollouts.status().batches[0].tokens)
            assert {replica.stepper.stats().weights_version for replica in cluster.replicas.values()} == {0}
        assert 0 < made[0] < made[1] or not early
        disk.open.set()
        await update
        await asyncio.sleep(1.0)
        cluster.kill_coordinator()
        (result,) = await rolling
        assert [disk.problem("b", "p", sample) for sample in result.samples] == [None] * 4
        assert [[one.weights_version for one in sample.segments][:1] for sample in result.samples] == [[0]] * 4
        assert cluster.coordinators == 2

    loop = VirtualLoop()
    loop.run_until_complete(story())
    end_of(loop)


async def groups_of(client, batch: RolloutBatch) -> list:
    return [group async for group in client.rollout(batch)]


def test_a_failing_schedule_is_shortened(monkeypatch):
    any_answer(monkeypatch)
    kinds = ("damaged", "slow", "late", "join")
    seed = next(seed for seed in range(7, 60) if outcome_of(seed, kinds).problem)
    short = shortened(plan_of(seed, kinds))
    assert run(short).problem is not None
    assert [fault.kind for fault in short.faults] == ["damaged"]


def test_a_schedule_that_ends_the_simulation_itself_is_shortened(monkeypatch):
    def ends(plan):
        if any(fault.kind == "damaged" for fault in plan.faults):
            raise ZeroDivisionError
        return Outcome(plan.seed, None, ())

    monkeypatch.setattr("tailrace.lab.fuzz.campaign.run", ends)
    plans = (plan_of(seed, ("damaged", "slow", "late", "join")) for seed in range(60))
    plan = next(plan for plan in plans if {"damaged"} < {fault.kind for fault in plan.faults})
    assert [fault.kind for fault in shortened(plan).faults] == ["damaged"]


def test_the_command_reports_and_refuses_unknown_kinds():
    ran = CliRunner().invoke(main, ["fuzz", "--seeds", "8", "--kinds", "kill,coordinator", "--json"])
    result = json.loads(ran.stdout.splitlines()[-1])
    assert ran.exit_code == 0 and result["seeds"] == 8 and result["failures"] == {}
    assert set(result["faults"]) <= {"kill", "coordinator"} and result["samples"] > 0
    refused = CliRunner().invoke(main, ["fuzz", "--kinds", "earthquake"])
    assert refused.exit_code == 2 and "--kinds earthquake: known: kill" in refused.output
    refused = CliRunner().invoke(main, ["fuzz", "--always", "kill"])
    assert refused.exit_code == 2 and "--always kill: known: quotas" in refused.output


def test_the_order_of_kinds_in_the_command_changes_no_history():
    """Both orders share a file of outcomes."""
    one, other = _kinds("kill,silence,quotas", "lanes"), _kinds("quotas,silence,kill,kill", "lanes")
    assert one == other == ("kill", "silence", "quotas", "lanes" + ALWAYS)
    assert _kinds(None, "") == (*KINDS, *ODDITIES, *WORLDS), "histories of all kinds stay as they were"


def test_every_seed_has_the_worlds_that_the_command_always_wants(monkeypatch):
    monkeypatch.setattr("tailrace.lab.fuzz.campaign.ProcessPoolExecutor", InProcess)
    begun = []

    def noted(plan):
        begun.append(plan)
        return Outcome(plan.seed, None, ())

    monkeypatch.setattr("tailrace.lab.fuzz.campaign.run", noted)
    ran = CliRunner().invoke(main, ["fuzz", "--seeds", "12", "--always", "lanes"])
    assert ran.exit_code == 0 and len(begun) == 12
    assert all("lanes" in plan.size.policies for plan in begun)


class InProcess:
    """A pool that runs what is submitted here and at once: a spawned process imports for six seconds."""

    def __init__(self, *_, **__):
        pass

    def submit(self, work, *given) -> Future:
        done = Future()
        done.set_result(work(*given))
        return done

    def shutdown(self, **_) -> None:
        pass


def test_a_campaign_that_was_stopped_is_continued(tmp_path, monkeypatch):
    """In this process; the test above has the command's own."""
    monkeypatch.setattr("tailrace.lab.fuzz.campaign.ProcessPoolExecutor", InProcess)

    def fuzz(seeds, kinds="kill,coordinator"):
        ran = CliRunner().invoke(main, ["fuzz", "--seeds", str(seeds), "--kinds", kinds, "--json", "--out", str(path)])
        return ran.exit_code, json.loads(ran.stdout.splitlines()[-1]) if ran.exit_code == 0 else ran.output

    path = tmp_path / "outcomes.jsonl"
    code, first = fuzz(4)
    assert code == 0 and path.read_bytes().count(b"\n") == 1 + 4
    path.write_bytes(path.read_bytes()[:-5])  # it was stopped while it wrote the last one
    code, whole = fuzz(10)
    written = path.read_bytes()
    assert code == 0 and written.count(b"\n") == 1 + 10 and whole["seeds"] == 10 and whole["tokens"] > first["tokens"]
    code, again = fuzz(10)
    assert again == whole | {"seeds_per_min": 0} and path.read_bytes() == written
    assert fuzz(10, "kill")[0] == 2 and "of other kinds of faults" in fuzz(10, "kill")[1]
    path.write_bytes(written.replace(b'"samples": ', b'"samples": "x", "more": '))
    assert fuzz(10)[0] == 2 and "line 2: not an outcome" in fuzz(10)[1]


def test_a_change_of_policies_waits_for_the_batches_before_it(tmp_path):
    """A batch that comes later waits too, and runs under the new policies; one that runs goes on under the old."""

    async def story():
        size = replace(
            plan_of(0).size, replicas=2, limits=None, mean_tokens=400, step_tokens=1, step_s=0.1, policies={}
        )
        cluster = SimulatedCluster(size, Random(0), LogDisk("sound", tmp_path, Random(0)))
        one = PromptGroup(prompt_id="p", token_ids=(1, 2), samples=2, max_tokens=100)
        first, later = (RolloutBatch(batch_id=name, groups=(one,)) for name in ("first", "later"))
        rolling = asyncio.ensure_future(groups_of(driver_client(cluster), first))
        await asyncio.sleep(3.0)
        await driver_client(cluster).set_policies(Policies(ordering="fcfs"))
        waiting = asyncio.ensure_future(groups_of(driver_client(cluster), later))
        await asyncio.sleep(3.0)
        status = cluster.coordinator.rollouts.status()
        assert status.at_admission == ("later",) and [batch.batch_id for batch in status.batches] == ["first"]
        assert status.policies["ordering"]["type"] == "seer" and not rolling.done()
        await rolling
        await asyncio.sleep(3.0)
        status = cluster.coordinator.rollouts.status()
        assert status.at_admission == () and [batch.batch_id for batch in status.batches] == ["later"]
        assert status.policies["ordering"]["type"] == "fcfs"
        ((ended,), (again,)) = await rolling, await waiting
        assert [sample.token_ids for sample in ended.samples] == [sample.token_ids for sample in again.samples]

    loop = VirtualLoop()
    loop.run_until_complete(story())
    end_of(loop)


class TwoStreams:
    """A service that is lost in the first stream, and refuses the second by its quota."""

    def __init__(self, *streams: list):
        self.streams = list(streams)
        self.rollout = self.renew = self

    def options(self, stream: bool) -> "TwoStreams":
        return self

    def remote(self, *args):
        return Items(self.streams.pop(0) if len(args) == 5 and self.streams else [])


class Items:
    def __init__(self, items: list):
        self._items = iter(items)

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = next(self._items, None)
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        pass


def test_a_batch_that_was_taken_waits_for_its_quota_after_a_restart():
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,)),))
    full = Rejected(reason="the quota is used up", by=RejectedBy.QUOTA)
    group = GroupResult(batch_id="b", prompt_id="p", prompt_token_ids=(1,), samples=())

    def client(*streams) -> RolloutClient:
        beats = SimpleNamespace(stop=lambda: None)
        return RolloutClient(telemetry=Telemetry("test"), handle=TwoStreams(*streams), heartbeat=lambda beat: beats)

    lost_once = client([OutOfMemoryError("killed")], [full], [group])
    assert asyncio.run(groups_of(lost_once, batch)) == [group]
    with pytest.raises(QuotaExceeded, match="used up"):
        asyncio.run(groups_of(client([full], [group]), batch))
