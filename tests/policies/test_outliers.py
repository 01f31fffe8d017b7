"""Migration of outliers (RhymeRL 6.3) in the core: who moves, when, and where it continues."""

from collections import Counter
from random import Random

import pytest
from test_rollout_cases import join, tick

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.histo_pipe import HistoPipe
from tailrace.policies.families.registry import Policies
from tailrace.policies.models.outlier_rule import OutlierRule
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, EndSample, StartChunk

SAMPLES = 10


class Story:
    """Ranking groups of one prompt each, of 10 samples, by the tokens of their history; as many replicas.

    `starts`: the last chunk of each sample.
    """

    def __init__(self, kv_on_update: str = "fresh", kinds: tuple = (("short", 20), ("long", 50)), **knobs):
        self.kinds = kinds
        whole = {"type": "fixed", "chunk_tokens": None}
        policies = Policies(ordering=HistoPipe(two_tier=False, **knobs), chunking=whole, kv_on_update=kv_on_update)
        self.core = RolloutCore(policies)
        self.now, self.starts = 0.0, {}
        for number in range(len(kinds)):
            self.core.observe(join(f"r{number}", 10_000, max_running=64))
        self.submit(1)

    def submit(self, step: int) -> None:
        groups = tuple(ev.GroupSpec(f"{kind}{step}", 10, SAMPLES, 200, ((length,) * 3,)) for kind, length in self.kinds)
        self.core.observe(ev.SamplesSubmitted(self.now, f"step-{step}", groups, priority=-step, step=step))
        self.look()

    def look(self) -> list:
        self.now += 1.0
        actions = tick(self.core, self.now)
        self.starts |= {action.sample_id: action for action in actions if isinstance(action, StartChunk)}
        return [action for action in actions if not isinstance(action, StartChunk)]

    def end(self, group_id: str, count: int, tokens: int = 15) -> None:
        for index in range(count):
            start = self.starts[f"{group_id}#{index}"]
            self.core.observe(ev.ChunkFinished(self.now, start.chunk_id, tokens, ev.ChunkEnd.STOP, 0))

    def stream(self, sample_id: str, tokens: int) -> None:
        self.core.observe(ev.TokensStreamed(self.now, {self.starts[sample_id].chunk_id: tokens}, self.now))

    def aborted(self) -> list[str]:
        return [action.chunk_id for action in self.look() if isinstance(action, AbortChunk)]

    def stop(self, sample_id: str, tokens: int) -> StartChunk:
        """Ends an aborted chunk. Returns the next one of its sample."""
        start = self.starts[sample_id]
        self.core.observe(ev.ChunkFinished(self.now, start.chunk_id, tokens, ev.ChunkEnd.ABORTED, 0))
        self.look()
        return self.starts[sample_id]


def test_a_short_group_s_outlier_moves_to_a_replica_at_work_on_a_longer_one_and_keeps_its_tokens():
    story = Story(migrate=True)
    home = story.starts["short1#9"].replica_id
    story.stream("short1#9", 60)
    story.end("short1", 8)
    assert story.aborted() == [], "two of ten are more than the last tenth"
    story.end("short1", 0)
    story.core.observe(ev.ChunkFinished(story.now, story.starts["short1#8"].chunk_id, 15, ev.ChunkEnd.STOP, 0))
    assert story.aborted() == [story.starts["short1#9"].chunk_id]
    again = story.stop("short1#9", 61)
    assert again.start == 61 and again.replica_id == story.starts["long1#0"].replica_id != home
    assert story.core.outliers.moves == {"within": 1, "next": 0}


def test_an_outlier_moves_once_though_another_longer_group_is_at_work():
    story = Story(kinds=(("short", 20), ("middle", 30), ("long", 50)), migrate=True)
    story.end("short1", 9)
    story.stream("short1#9", 60)
    assert story.aborted()
    story.stop("short1#9", 61)
    story.stream("short1#9", 30)
    assert story.aborted() == [] and story.core.outliers.moves == {"within": 1, "next": 0}


@pytest.mark.parametrize(("tokens", "moves"), [(22, False), (23, True)])
def test_an_outlier_is_past_the_growth_of_its_group_s_longest_median(tokens, moves):
    story = Story(migrate=True)
    story.end("short1", 9)
    story.stream("short1#9", tokens)
    assert bool(story.aborted()) == moves


def test_a_long_group_s_outlier_moves_to_the_next_batch_s_longest_once_that_is_in_flight():
    story = Story(migrate=True)
    story.end("long1", 9, tokens=40)
    story.stream("long1#9", 90)
    assert story.aborted() == []
    story.submit(2)
    assert story.core.outliers.moves == {"within": 0, "next": 1}
    again = story.stop("long1#9", 91)
    assert again.replica_id == story.starts["long2#0"].replica_id != story.starts["long1#0"].replica_id
    story.core.observe(ev.ChunkFinished(story.now, again.chunk_id, 5, ev.ChunkEnd.STOP, 0))
    assert [action.sample_id for action in story.look() if isinstance(action, EndSample)] == ["long1#9"]
    assert story.core.outliers.moved == {}, "its group has been emitted"


def test_nothing_moves_without_leave_or_without_history_or_while_replicas_keep_older_weights():
    still, finishing = Story(), Story("finish", migrate=True)
    finishing.core.observe(ev.WeightsChanged(finishing.now, 1))
    for story in (still, finishing):
        story.end("short1", 9)
        story.stream("short1#9", 90)
    assert still.aborted() == [] and finishing.core.outliers.look(finishing.now + 1.0) == []
    assert finishing.core.replicas.kept and not finishing.core.outliers.moved
    assert OutlierRule().limits([[()], [((20, 30, 40),), ((10,),)]]) == [None, pytest.approx(33.0)]


def test_an_outlier_whose_new_replica_leaves_goes_back_to_its_group_s():
    story = Story(migrate=True)
    home = story.starts["short1#9"].replica_id
    story.end("short1", 9)
    story.stream("short1#9", 60)
    story.aborted()
    other = story.stop("short1#9", 61).replica_id
    story.core.observe(ev.ReplicaLeft(story.now, other, "gone"))
    story.look()
    assert story.starts["short1#9"].replica_id == home and story.starts["short1#9"].start == 61


@pytest.mark.parametrize("runs", [10, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("chunk_tokens", [13, None])
def test_in_random_runs_every_sample_ends_once_with_all_its_tokens(chunk_tokens, runs):
    """Three batches of prompts whose histories tell little, of which all samples past them may move; replicas leave."""
    moved = sum(_random_run(seed, chunk_tokens) for seed in range(runs))
    assert moved > runs


def _random_run(seed: int, chunk_tokens: int | None) -> int:
    """Returns the number of moves of a run."""
    rng = Random(seed)
    ordering = HistoPipe(migrate=True, last_share=1.0, ranking_groups=3)
    core = RolloutCore(Policies(ordering=ordering, chunking={"type": "fixed", "chunk_tokens": chunk_tokens}))
    lengths, made, running, ended = {}, Counter(), {}, []
    for name in range(4):
        core.observe(join(f"r{name}", 400, max_running=rng.randint(2, 30)))
    for step in range(3):
        past = [((rng.randint(1, 60),) * 2, (rng.randint(1, 60),)) for _ in range(6)]
        groups = tuple(ev.GroupSpec(f"b{step}.{n}", 10, 3, 200, past[n]) for n in range(6))
        lengths |= {f"{group.group_id}#{index}": rng.randint(1, 199) for group in groups for index in range(3)}
        core.observe(ev.SamplesSubmitted(0.0, f"b{step}", groups, step=step))
    now, leaves_at = 0.0, rng.randint(1, 100)
    while len(ended) < len(lengths):
        now += 0.3
        if now > leaves_at:
            leaves_at = float("inf")
            core.observe(ev.ReplicaLeft(now, "r3", "gone"))
            running = {chunk_id: start for chunk_id, start in running.items() if start.replica_id != "r3"}
        for action in tick(core, now):
            match action:
                case StartChunk():
                    assert action.start == made[action.sample_id]
                    running[action.chunk_id] = action
                case AbortChunk():
                    _end(core, running.pop(action.chunk_id), now, rng.random(), lengths, made)
                case EndSample():
                    ended.append(action.sample_id)
        chosen = rng.choice([*running]) if running else None
        if chosen is not None and rng.random() < 0.5:
            left = lengths[running[chosen].sample_id] - running[chosen].start
            core.observe(ev.TokensStreamed(now, {chosen: rng.randint(0, min(left, running[chosen].max_tokens))}, now))
        elif chosen is not None:
            _end(core, running.pop(chosen), now, None, lengths, made)
    assert sorted(ended) == sorted(lengths) and made == lengths
    return sum(core.outliers.moves.values())


def _end(core, start: StartChunk, now: float, share: float | None, lengths, made) -> None:
    """Ends a chunk by itself, or as aborted after a share of its tokens."""
    left = lengths[start.sample_id] - start.start
    tokens = min(left, start.max_tokens) if share is None else int(share * min(left, start.max_tokens))
    made[start.sample_id] += tokens
    stops = ev.ChunkEnd.STOP if tokens == left else ev.ChunkEnd.LENGTH
    core.observe(ev.ChunkFinished(now, start.chunk_id, tokens, stops if share is None else ev.ChunkEnd.ABORTED, 0))
