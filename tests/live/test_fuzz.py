"""The live shell in simulation: seeds with all faults, and that the simulation finds the defects that it is for."""

import json
import logging

import pytest
from click.testing import CliRunner

from tailrace.app.cli import main
from tailrace.app.fuzz import stepper
from tailrace.app.fuzz.campaign import campaign, outcome_of
from tailrace.app.fuzz.faults import KINDS
from tailrace.app.fuzz.run import plan_of, run, shortened
from tailrace.deployments.coordinator import chunk_runner, chunk_watch
from tailrace.deployments.coordinator.rollouts import Rollouts
from tailrace.deployments.engine.engine_loop import EngineLoop
from tailrace.policies.core import failures
from tailrace.policies.protocol.events import ReplicasReserved

SEEDS = 120

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

KEPT_KINDS = tuple(kind for kind in KINDS if kind != "swallow")
"""The kinds of faults at that time: a seed's schedule depends on them."""


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.ERROR)  # contained errors are expected here
    yield
    logging.disable(logging.NOTSET)


def test_no_seed_fails():
    outcomes = list(campaign(range(1000, 1000 + SEEDS), tuple(KINDS)))
    assert {outcome.seed: outcome.problem for outcome in outcomes if outcome.problem} == {}
    assert len(outcomes) == SEEDS and sum(outcome.samples for outcome in outcomes) > 100 * SEEDS
    assert {fault.kind for outcome in outcomes for fault in outcome.faults} == set(KINDS)


@pytest.mark.parametrize("seed", KEPT)
def test_a_defect_that_was_mended_stays_mended(seed):
    assert outcome_of(seed, KEPT_KINDS).problem is None


def test_the_same_seed_gives_the_same_history():
    one, other = (outcome_of(7, tuple(KINDS)) for _ in range(2))
    assert one == other and one.samples


def any_answer(monkeypatch):
    monkeypatch.setattr(chunk_runner, "check_result", lambda start, result: None)


def threads_that_live(monkeypatch):
    monkeypatch.setattr(EngineLoop, "overdue_s", 0.0)


def chunks_without_watch(monkeypatch):
    monkeypatch.setattr(chunk_watch, "STALLED_S", 1e9)


def contents_by_version(monkeypatch):
    """As if all contents had one digest."""
    monkeypatch.setattr(stepper, "digest_of", lambda content: "the same")


def replicas_without_blame(monkeypatch):
    """As before a replica could be to blame."""
    monkeypatch.setattr(failures, "MAX_SAMPLES", 10**9)
    monkeypatch.setattr(failures, "MAX_DOUBTFUL_ATTEMPTS", failures.MAX_ATTEMPTS)
    monkeypatch.setattr(failures, "SAMPLE_PAUSE_S", (0.0, 0.0))


def errors_that_are_not_contained(monkeypatch):
    def reserve(self, replicas):
        self._tell(ReplicasReserved(self.now(), replicas))

    def restart_core(self, place, error):
        raise error

    monkeypatch.setattr(Rollouts, "reserve", reserve)
    monkeypatch.setattr(Rollouts, "_restart_core", restart_core)


@pytest.mark.parametrize(
    ("broken", "kinds", "first", "problem"),
    [
        (any_answer, ("damaged",), 0, "are not those of weights"),
        (chunks_without_watch, ("swallow",), 0, "have not ended"),
        (threads_that_live, ("hang_for_ever",), 0, "have not ended"),
        (contents_by_version, ("overwrite", "join", "kill"), 59, "are not those of weights"),
        (replicas_without_blame, ("refuse",), 0, "given up"),
        (errors_that_are_not_contained, ("strange_reserve",), 0, "a loop of the coordinator has ended"),
    ],
)
def test_the_simulation_finds_the_defect(monkeypatch, broken, kinds, first, problem):
    """Without one of the safeguards, some seed fails: a check that cannot fail would let all of them pass."""
    broken(monkeypatch)
    problems = (outcome_of(seed, kinds).problem for seed in range(first, first + 60))
    assert problem in next(filter(None, problems))


def test_a_failing_schedule_is_shortened(monkeypatch):
    any_answer(monkeypatch)
    kinds = ("damaged", "slow", "late", "join")
    seed = next(seed for seed in range(60) if outcome_of(seed, kinds).problem)
    short = shortened(plan_of(seed, kinds))
    assert run(short).problem is not None
    assert [fault.kind for fault in short.faults] == ["damaged"]


def test_the_command_reports_and_refuses_unknown_kinds():
    ran = CliRunner().invoke(main, ["fuzz", "--seeds", "8", "--kinds", "kill,coordinator", "--json"])
    result = json.loads(ran.stdout.splitlines()[-1])
    assert ran.exit_code == 0 and result["seeds"] == 8 and result["failures"] == {}
    assert set(result["faults"]) <= {"kill", "coordinator"} and result["samples"] > 0
    refused = CliRunner().invoke(main, ["fuzz", "--kinds", "earthquake"])
    assert refused.exit_code == 2 and "--kinds earthquake: known: kill" in refused.output
