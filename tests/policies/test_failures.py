"""Failed chunks: the replica or the sample is to blame, and each pauses for a while."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from tailrace.policies.core.failures import (
    MAX_ATTEMPTS,
    MAX_DOUBTFUL_ATTEMPTS,
    MAX_SAMPLES,
    REPLICA_PAUSE_S,
    Failures,
)
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EndSample, SampleEnd, StartChunk


class Game:
    """A core with replicas that fail the chunks of chosen samples, or all of them."""

    def __init__(self, *replicas: str, samples: int = 8, max_tokens: int = 400):
        chunking = {"type": "fixed", "chunk_tokens": 16}
        self.core, self.now = RolloutCore(Policies(chunking=chunking)), 0.0
        for replica_id in replicas:
            self.join(replica_id)
        self.core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, samples, max_tokens),)))
        self.starts: list[tuple[float, StartChunk]] = []
        self.ends: dict[str, EndSample] = {}
        self.running: list[StartChunk] = []

    def join(self, replica_id: str) -> None:
        self.core.observe(
            ev.ReplicaJoined(
                now=self.now, replica_id=replica_id, block_tokens=16, kv_capacity_blocks=1000, max_running=4,
                draft_tokens=0, weights_version=0,
            )
        )  # fmt: skip

    def play(self, until_s: float, fails, step_s: float = 0.5) -> None:
        """Each step ends all running chunks; `fails(start)` says whether a chunk fails."""
        while self.now < until_s:
            for start in self.running:
                if fails(start):
                    self.core.observe(ev.ChunkFailed(self.now, start.chunk_id, "refused"))
                else:
                    end = ev.ChunkFinished(self.now, start.chunk_id, start.max_tokens, ev.ChunkEnd.LENGTH, 0)
                    self.core.observe(end)
            actions = self.core.decide(ev.Tick(self.now))
            self.running = [action for action in actions if isinstance(action, StartChunk)]
            self.starts += [(self.now, start) for start in self.running]
            self.ends |= {action.sample_id: action for action in actions if isinstance(action, EndSample)}
            self.now += step_s

    def started_on(self, replica_id: str) -> list[float]:
        return [at_s for at_s, start in self.starts if start.replica_id == replica_id]


def test_a_replica_that_fails_everything_takes_no_sample_with_it():
    game = Game("bad", "good", samples=32)
    game.play(3.0, lambda start: start.replica_id == "bad")
    assert game.core.replicas.aside("bad").startswith(f"{MAX_SAMPLES} samples failed on it in a row; the last: refused")
    assert not game.core.replicas.aside("good") and sum(view.running > 0 for view in game.core.replicas.views()) == 1
    game.play(200.0, lambda start: start.replica_id == "bad")
    assert len(game.ends) == 32
    assert {end.end for end in game.ends.values()} == {SampleEnd.LENGTH}


def test_it_is_tried_again_after_pauses_that_double_and_one_success_ends_its_exile():
    game = Game("bad", samples=8)
    game.play(100.0, lambda start: True)
    trials = sorted(set(game.started_on("bad")))
    gaps = [later - earlier for earlier, later in pairwise(trials) if later - earlier > 1.0]
    assert gaps[:3] == pytest.approx([REPLICA_PAUSE_S[0] * factor for factor in (1, 2, 4)], abs=1.0)
    assert not game.ends, "it is the replica's fault"
    game.play(1000.0, lambda start: False)
    assert len(game.ends) == 8 and game.core.replicas.aside("bad") == ""


def test_samples_that_every_replica_refuses_end_at_last():
    game = Game("one", "two", samples=8)
    game.play(7200.0, lambda start: True, step_s=2.0)
    assert {end.end for end in game.ends.values()} == {SampleEnd.FAILED} and len(game.ends) == 8


def test_a_sample_that_no_replica_can_run_ends_at_once_and_nothing_else_is_to_blame():
    game = Game("r", samples=4)
    core, first = game.core, ev.Tick(0.0)
    starts = [action for action in core.decide(first) if isinstance(action, StartChunk)]
    assert len(starts) > MAX_SAMPLES, "so many failures would set the replica aside"
    for start in starts:
        core.observe(ev.ChunkFailed(0.0, start.chunk_id, "not for this model", of_sample=True))
    ends = [action for action in core.decide(first) if isinstance(action, EndSample)]
    assert [(one.end, one.error) for one in ends] == [(SampleEnd.FAILED, "not for this model")] * len(starts)
    assert not core.replicas.aside("r")


def test_a_refused_sample_is_tried_once_and_costs_its_mates_and_its_replica_nothing():
    game = Game("r", samples=8)
    refused = {f"g#{number}" for number in range(0, 8, 2)}
    while len(game.ends) < 8:
        for start in [one for one in game.running if one.sample_id in refused]:
            game.core.observe(ev.ChunkFailed(game.now, start.chunk_id, "its top_k", of_sample=True))
            game.running.remove(start)
        game.play(game.now + 0.5, lambda start: False)
    assert {name for name, end in game.ends.items() if end.end is SampleEnd.FAILED} == refused
    tries = [start.sample_id for _, start in game.starts if start.sample_id in refused]
    assert sorted(tries) == sorted(refused), "one attempt each"
    assert not game.core.replicas.aside("r") and not game.core.counts()["waiting"]
    assert {end.end for name, end in game.ends.items() if name not in refused} == {SampleEnd.LENGTH}


def test_a_poisoned_sample_is_given_up_where_others_succeed():
    game = Game("one", "two", samples=6, max_tokens=1600)
    game.play(200.0, lambda start: start.sample_id == "g#3")
    end = game.ends["g#3"]
    assert end.end is SampleEnd.FAILED and end.error.endswith("chunks in a row failed; the last: refused")
    whole = {name for name, one in game.ends.items() if one.end is SampleEnd.LENGTH}
    assert whole == {f"g#{index}" for index in (0, 1, 2, 4, 5)}
    tries = [start for _, start in game.starts if start.sample_id == "g#3"]
    assert MAX_ATTEMPTS <= len(tries) <= MAX_ATTEMPTS + 2


def test_alone_on_its_replica_a_sample_gets_more_tries_with_growing_pauses():
    game = Game("only", samples=1)
    game.play(600.0, lambda start: True)
    tries = game.started_on("only")
    assert len(tries) == MAX_DOUBTFUL_ATTEMPTS and game.ends["g#0"].end is SampleEnd.FAILED
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == sorted(gaps) and gaps[0] == 0.5


def test_a_paused_sample_is_cancelled_with_its_batch():
    game = Game("only", samples=1)
    game.play(3.0, lambda start: True)
    game.running = []
    game.core.observe(ev.BatchCancelled(game.now, "b"))
    game.play(4.0, lambda start: True)
    assert game.ends["g#0"].end is SampleEnd.CANCELLED
    assert game.core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}


def test_a_replica_is_set_aside_for_a_sample_that_has_succeeded_elsewhere_since():
    table = SimpleNamespace(set_aside=lambda replica_id, why: aside.append(replica_id))
    running, aside = SimpleNamespace(turns=0), []
    failures = Failures(table, running)

    def on(name: str, replica_id: str) -> tuple[SimpleNamespace, SimpleNamespace]:
        running.turns += 1
        return SimpleNamespace(sample_id=name), SimpleNamespace(replica_id=replica_id, born=running.turns)

    failures.fail(*on("s0", "bad"), "refused", 0.0)
    failures.succeed(*on("s0", "good"))
    failures.fail(*on("s0", "good"), "out of memory", 1.0)
    for number in range(1, MAX_SAMPLES):
        failures.fail(*on(f"s{number}", "bad"), "refused", 2.0)
    assert aside == ["bad"]
    assert failures.attempts(SimpleNamespace(sample_id="s0")) == 1


def test_a_success_of_a_chunk_from_before_the_failures_says_nothing_of_them():
    aside, back, running = [], [], SimpleNamespace(turns=0)
    table = SimpleNamespace(set_aside=lambda replica_id, why: aside.append(replica_id), readmit=back.append)
    failures = Failures(table, running)

    def chunk(name: str) -> tuple[SimpleNamespace, SimpleNamespace]:
        running.turns += 1
        return SimpleNamespace(sample_id=name), SimpleNamespace(replica_id="r", born=running.turns)

    old = chunk("old")
    for number in range(MAX_SAMPLES - 1):
        failures.fail(*chunk(f"s{number}"), "refused", 0.0)
    failures.succeed(*old)
    assert not aside and not back
    failures.fail(*chunk("last"), "refused", 0.0)
    assert aside == ["r"]
    failures.succeed(*chunk("new"))
    assert back == ["r"]


def test_a_sample_is_to_blame_from_its_second_failure_where_another_succeeds_in_between():
    """Also if its first chunk was the first of all."""
    table = SimpleNamespace(set_aside=lambda replica_id, why: None, readmit=lambda replica_id: None)
    running, tries = SimpleNamespace(turns=0), 0
    failures = Failures(table, running)

    def chunk(name: str) -> tuple[SimpleNamespace, SimpleNamespace]:
        running.turns += 1
        return SimpleNamespace(sample_id=name), SimpleNamespace(replica_id="r", born=running.turns)

    given_up = False
    while not given_up:
        given_up = failures.fail(*chunk("bad"), "refused", 0.0).given_up
        tries += 1
        failures.succeed(*chunk("good"))
    assert tries == MAX_ATTEMPTS + 1


@pytest.mark.parametrize("took_chunk", [False, True])
def test_a_sample_is_not_to_blame_for_replicas_that_never_took_its_chunk(took_chunk):
    """The coordinator may lose sight of all replicas within a moment, and the sample passes through each."""
    names = [f"r{number}" for number in range(MAX_ATTEMPTS + 1)]
    game = Game(*names, samples=1)
    game.play(0.5, lambda start: False)
    for _ in range(MAX_ATTEMPTS):
        (start,) = game.running
        game.core.observe(ev.ReplicaLeft(game.now, start.replica_id, "not running", took_chunk))
        actions = game.core.decide(ev.Tick(game.now))
        game.running = [action for action in actions if isinstance(action, StartChunk)]
        game.ends |= {action.sample_id: action for action in actions if isinstance(action, EndSample)}
    assert {end.end for end in game.ends.values()} == ({SampleEnd.FAILED} if took_chunk else set())
    game.play(100.0, lambda start: False)
    assert {end.end for end in game.ends.values()} == {SampleEnd.FAILED if took_chunk else SampleEnd.LENGTH}


def test_a_replica_that_leaves_while_it_is_aside_is_forgotten():
    game = Game("bad", "good", samples=32)
    game.play(3.0, lambda start: start.replica_id == "bad")
    assert game.core.replicas.aside("bad")
    game.core.observe(ev.ReplicaLeft(game.now, "bad", "killed"))
    game.running = [start for start in game.running if start.replica_id != "bad"]
    game.play(200.0, lambda start: False)
    assert len(game.ends) == 32 and {end.end for end in game.ends.values()} == {SampleEnd.LENGTH}


class DeadlyGame(Game):
    """Chunks of the samples named `deadly` end their replicas before any chunk there ends; others take their place."""

    def __init__(self, *replicas: str, deadly: set[str], samples: int):
        super().__init__(*replicas, samples=samples)
        self.deadly, self.killed = deadly, []

    def play(self, until_s: float, fails=lambda start: False, step_s: float = 0.5) -> None:
        while self.now < until_s:
            doomed = sorted({start.replica_id for start in self.running if start.sample_id in self.deadly})
            self.running = [start for start in self.running if start.replica_id not in doomed]
            for replica_id in doomed:
                self.core.observe(ev.ReplicaLeft(self.now, replica_id, "out of memory"))
                self.killed.append(replica_id)
                self.join(f"{replica_id}'")
            super().play(min(until_s, self.now + step_s), fails, step_s)


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("samples", [1, 2, 8, 64])
def test_a_sample_that_ends_its_replicas_takes_no_other_with_it(replicas, samples):
    game = DeadlyGame(*(f"r{number}" for number in range(replicas)), deadly={"g#0"}, samples=samples)
    game.play(400.0)
    ends = {name: end.end for name, end in game.ends.items()}
    assert ends.pop("g#0") is SampleEnd.FAILED
    assert " chunks in a row failed; the last: replica " in game.ends["g#0"].error
    assert list(ends.values()) == [SampleEnd.LENGTH] * (samples - 1)
    assert len(game.killed) <= MAX_ATTEMPTS + 3, "each round without a loss halves the suspects"


def test_several_of_them_are_found_one_after_the_other():
    game = DeadlyGame("one", "two", deadly={"g#3", "g#17", "g#30"}, samples=32)
    game.play(400.0)
    assert {name for name, end in game.ends.items() if end.end is SampleEnd.FAILED} == game.deadly
    assert len(game.ends) == 32


def test_a_replica_that_leaves_and_comes_back_counts_once():
    game = Game("one", "two", samples=8)
    game.play(0.5, lambda start: False)
    for _ in range(MAX_ATTEMPTS * 2):
        for replica_id in sorted({start.replica_id for start in game.running}):
            game.core.observe(ev.ReplicaLeft(game.now, replica_id, "not heard"))
            game.join(replica_id)
        game.running = []
        game.play(game.now + 0.5, lambda start: False)
    game.play(200.0, lambda start: False)
    assert [end.end for end in game.ends.values()] == [SampleEnd.LENGTH] * 8


def test_trials_are_of_one_sample_first_and_twice_as_many_after_each_round_without_a_loss():
    game = Game("one", "two", samples=8)
    for time in ("first", "second"):
        game.play(game.now + 0.5, lambda start: False)
        for _ in range(2):
            for replica_id in sorted({start.replica_id for start in game.running}):
                game.core.observe(ev.ReplicaLeft(game.now, replica_id, "killed"))
                game.join(f"{replica_id}'")
            game.running = []
            game.play(game.now + 0.5, lambda start: False)
        waiting = {sample.sample_id for sample in game.core.samples()} - {start.sample_id for start in game.running}
        why = {game.core.awaited.by(game.core.sample(sample_id)) for sample_id in waiting}
        assert why == {"its trial, since replicas left under it"}
        rounds = [len(game.running)]
        for _ in range(3):
            game.play(game.now + 0.5, lambda start: False)
            rounds.append(len(game.running))
        assert rounds == [1, 3, 7, 8], f"the {time} time: one, then two more beside it, then four"


def test_a_sample_whose_trial_ends_by_a_refusal_waits_for_another_one():
    game = Game("one", samples=4)
    for number in range(2):
        game.play(game.now + 0.5, lambda start: False)
        game.core.observe(ev.ReplicaLeft(game.now, "one" + number * "'", "killed"))
        game.join("one" + (number + 1) * "'")
        game.running, game.starts = [], []
    game.play(game.now + 1.0, lambda start: True)
    assert [(at_s, start.sample_id) for at_s, start in game.starts] == [(1.0, "g#0"), (1.5, "g#1"), (1.5, "g#2")]
