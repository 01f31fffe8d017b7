"""Single stories of the rollout core that random plays tell too seldom."""

import pytest
from rollout_machine import ORDERINGS, policies_of

from tailrace.policies.core.failures import MAX_DOUBTFUL_ATTEMPTS, MAX_LOST, MAX_LOST_ALONE, SAMPLE_PAUSE_S
from tailrace.policies.core.request_buffer import KNOWN_PROMPTS, Batch, Sample
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.core.validation import WrongAnswer
from tailrace.policies.families.chunking import FixedChunks
from tailrace.policies.families.kv_on_update import Fresh
from tailrace.policies.families.lengths import MaxFinished
from tailrace.policies.families.ordering import GroupStatic
from tailrace.policies.families.placement import LeastKv
from tailrace.policies.families.prefetch import NextUp
from tailrace.policies.families.registry import Policies, name_of
from tailrace.policies.families.tail import Hold, ReplicaGoal
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, EmitGroup, EndSample, SampleEnd, StartChunk
from tailrace.policies.protocol.views import SampleView


def core_of(ordering="fcfs", placement="least_kv", chunk_tokens=None, **replicas) -> RolloutCore:
    """A core with replicas of so many blocks of 16 tokens, by id."""
    core = RolloutCore(policies_of(ordering, placement, chunk_tokens))
    for replica_id, blocks in replicas.items():
        core.observe(join(replica_id, blocks))
    return core


def join(replica_id: str, blocks: int, max_running: int = 4, version: int = 0) -> ev.ReplicaJoined:
    return ev.ReplicaJoined(0.0, replica_id, 16, blocks, max_running, 0, version)


def submit(core: RolloutCore, *groups: ev.GroupSpec, batch_id: str = "b") -> None:
    if name_of(core.policies.ordering) == "oracle_longest_first":
        ids = [f"{spec.group_id}#{index}" for spec in groups for index in range(spec.samples)]
        core.observe(ev.LengthsRevealed(0.0, dict.fromkeys(ids, 1)))
    core.observe(ev.SamplesSubmitted(0.0, batch_id, groups))


def tick(core: RolloutCore, now: float = 0.0) -> tuple:
    return core.decide(ev.Tick(now))


def finish(core: RolloutCore, start: StartChunk) -> None:
    assert start.max_tokens > 0
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, start.max_tokens, ev.ChunkEnd.LENGTH, start.weights_version))


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("placement", ["least_kv", "pinned"])
def test_a_sample_too_large_for_every_replica_fails_with_the_reason(ordering, placement):
    core = core_of(ordering, placement, r=4, q=2)
    submit(core, ev.GroupSpec("g", 60, 1, 100))
    end, emit = tick(core)
    assert (end.end, end.reason) == (SampleEnd.FAILED, "does not fit") and "160 tokens" in end.error
    assert emit == EmitGroup("b", "g", emit.reason)


def test_a_sample_that_fits_to_the_token_runs():
    """The queues round needs up to 64 tokens; an idle replica of 112 takes 112 all the same."""
    core = core_of(r=7)
    submit(core, ev.GroupSpec("fits", 100, 1, 12), ev.GroupSpec("too_large", 100, 1, 13))
    (start,) = tick(core)
    assert (start.sample_id, start.max_tokens) == ("fits#0", 12)
    finish(core, start)
    assert [action.sample_id for action in tick(core) if isinstance(action, EndSample)] == ["fits#0", "too_large#0"]


def test_it_waits_for_a_replica_that_may_come_back_with_these_weights():
    core = core_of(small=4, large=20)
    core.observe(ev.WeightsChanged(0.0, 1))
    core.observe(join("small", 4, version=1))
    submit(core, ev.GroupSpec("g", 60, 1, 100))
    assert tick(core) == ()
    core.observe(join("large", 20, version=1))
    (start,) = tick(core)
    assert (start.replica_id, start.weights_version) == ("large", 1)


def test_a_sample_whose_chunks_fail_in_a_row_ends_with_the_last_error():
    core = core_of(r=20)
    submit(core, ev.GroupSpec("g", 10, 1, 10))
    for attempt in range(MAX_DOUBTFUL_ATTEMPTS):  # nothing else runs that could show whether the replica is sound
        now = attempt * SAMPLE_PAUSE_S[1]
        (start,) = tick(core, now)
        core.observe(ev.ChunkFailed(now, start.chunk_id, f"error {attempt}"))
    end, _ = tick(core)
    assert end.end is SampleEnd.FAILED
    assert end.error == f"{MAX_DOUBTFUL_ATTEMPTS} chunks in a row failed; the last: error {MAX_DOUBTFUL_ATTEMPTS - 1}"


def test_a_good_chunk_forgives_the_failures_before_it():
    core = core_of(chunk_tokens=10, r=20)
    submit(core, ev.GroupSpec("g", 10, 1, 30))
    for _ in range(2):
        for attempt in range(MAX_DOUBTFUL_ATTEMPTS - 1):
            now = attempt * SAMPLE_PAUSE_S[1]
            (start,) = tick(core, now)
            core.observe(ev.ChunkFailed(now, start.chunk_id, "error"))
        (start,) = tick(core, MAX_DOUBTFUL_ATTEMPTS * SAMPLE_PAUSE_S[1])
        finish(core, start)
    (start,) = tick(core)
    assert (start.start, start.max_tokens) == (20, 10)


def test_samples_whose_replicas_leave_run_alone_in_turns_until_they_are_given_up():
    core = core_of(chunk_tokens=10, r0=20)
    submit(core, ev.GroupSpec("g", 10, 2, 30))
    started, ends = [], []
    for number in range(MAX_LOST + 2 * MAX_LOST_ALONE + 1):
        actions = tick(core)
        started.append([action.sample_id for action in actions if isinstance(action, StartChunk)])
        ends += [action.error for action in actions if isinstance(action, EndSample)]
        core.observe(ev.ReplicaLeft(0.0, f"r{number}", "node gone"))
        core.observe(join(f"r{number + 1}", 20))
    assert started == [["g#0", "g#1"]] * MAX_LOST + [["g#0"], ["g#1"]] * MAX_LOST_ALONE + [[]]
    last = [f"5 chunks in a row failed; the last: replica r{number} left: node gone" for number in (6, 7)]
    assert ends == last


def test_a_batch_cancelled_while_no_replica_is_here_ends_at_once():
    core = core_of()
    submit(core, ev.GroupSpec("g", 10, 2, 10), ev.GroupSpec("h", 10, 1, 10))
    core.observe(ev.BatchCancelled(0.0, "b"))
    actions = tick(core)
    assert [type(action) for action in actions] == [EndSample, EndSample, EmitGroup, EndSample, EmitGroup]
    assert {action.end for action in actions if isinstance(action, EndSample)} == {SampleEnd.CANCELLED}
    submit(core, ev.GroupSpec("g", 10, 1, 10))
    core.observe(join("r", 20))
    assert [action.chunk_id for action in tick(core)] == ["g#0:0"], "what was cancelled does not come back"


def test_cancelling_aborts_what_runs_and_its_end_ends_the_sample():
    core = core_of(chunk_tokens=5, r=4)
    submit(core, ev.GroupSpec("g", 10, 2, 10))
    (start,) = tick(core)
    core.observe(ev.BatchCancelled(0.0, "b"))
    core.observe(ev.BatchCancelled(0.0, "b"))
    waiting, abort = tick(core)
    assert (waiting.sample_id, abort) == ("g#1", AbortChunk(start.chunk_id, "r", False, "cancelled"))
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, 3, ev.ChunkEnd.ABORTED, 0))
    assert [action.end for action in tick(core) if isinstance(action, EndSample)] == [SampleEnd.CANCELLED]


def test_an_aborted_chunk_nobody_cancelled_goes_on_where_it_stopped():
    core = core_of(chunk_tokens=8, r=20)
    submit(core, ev.GroupSpec("g", 10, 1, 10))
    (start,) = tick(core)
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, 3, ev.ChunkEnd.ABORTED, 0))
    (start,) = tick(core)
    assert (start.start, start.max_tokens) == (3, 7)


def test_a_chunk_that_ends_short_has_used_up_the_context():
    core = core_of(chunk_tokens=8, r=20)
    submit(core, ev.GroupSpec("g", 10, 1, 10))
    (start,) = tick(core)
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, 7, ev.ChunkEnd.LENGTH, 0))
    end, _ = tick(core)
    assert (end.end, end.reason) == (SampleEnd.LENGTH, "the model's context is used up")


def test_group_static_keeps_a_group_on_its_replica_and_moves_all_of_it_when_that_leaves():
    core = core_of("group_static", chunk_tokens=8, a=4, b=4, c=4)
    submit(core, *(ev.GroupSpec(f"g{i}", 10, 3, 16) for i in range(3)))
    starts = tick(core)
    assert [(start.sample_id, start.replica_id) for start in starts] == [("g0#0", "a"), ("g1#0", "b"), ("g2#0", "c")]
    core.observe(ev.ReplicaLeft(0.0, "b", "gone"))
    went = {"g0": set(), "g1": set(), "g2": set()}
    starts = [start for start in starts if start.replica_id != "b"]
    while starts:
        for start in starts:
            went[start.sample_id[:2]].add(start.replica_id)
            finish(core, start)
        starts = [action for action in tick(core) if isinstance(action, StartChunk)]
    assert went == {"g0": {"a"}, "g1": {"a"}, "g2": {"c"}}
    assert core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}


def test_group_static_binds_a_group_anew_as_a_whole_though_no_replica_was_ready_when_its_own_left():
    core = core_of("group_static", chunk_tokens=8, a=8, b=8)
    submit(core, ev.GroupSpec("g", 8, 4, 64), ev.GroupSpec("h", 8, 4, 64))
    core.observe(ev.WeightsChanged(0.0, 1))
    core.observe(ev.ReplicaLeft(0.0, "a", "gone"))
    assert tick(core) == ()
    core.observe(join("b", 8, version=1))
    core.observe(join("c", 8, version=1))
    starts = [action for action in tick(core) if isinstance(action, StartChunk)]
    homes = {group: {s.replica_id for s in starts if s.sample_id.startswith(group)} for group in "gh"}
    assert len(homes["g"]) == len(homes["h"]) == 1


def test_a_sample_follows_its_group_that_was_bound_anew_though_its_own_replica_stays_again():
    core = core_of("group_static", chunk_tokens=8, a=4, b=100)
    submit(core, ev.GroupSpec("g", 10, 2, 24))
    (start,) = tick(core)
    assert start.replica_id == "a", "where the other one has no room, and waits"
    core.replicas.close(["a"])
    core._bind_anew("a")
    (other,) = [action for action in tick(core) if isinstance(action, StartChunk)]
    assert other.replica_id == "b"
    core.replicas.close(())
    finish(core, start)
    (again,) = [action for action in tick(core) if isinstance(action, StartChunk)]
    assert (again.sample_id, again.replica_id) == (start.sample_id, "b")


def test_a_pinned_sample_waits_for_its_own_replica_and_moves_only_when_that_leaves():
    core = core_of("fcfs", "pinned", 8, a=3)
    submit(core, ev.GroupSpec("g", 10, 1, 24))
    (start,) = tick(core)
    core.observe(join("b", 100))
    finish(core, start)
    (start,) = tick(core)
    assert (start.replica_id, start.start) == ("a", 8)
    finish(core, start)
    core.observe(ev.ReplicaLeft(0.0, "a", "gone"))
    (start,) = tick(core)
    assert (start.replica_id, start.start) == ("b", 16)


def test_a_bound_sample_starts_at_once_when_its_replica_has_the_weights_before_they_are_wanted():
    core = core_of("fcfs", "pinned", 8, a=8, b=7)
    submit(core, ev.GroupSpec("g", 10, 2, 24))
    start, other = tick(core)
    assert (start.replica_id, other.replica_id) == ("a", "b"), "the other one runs all the while"
    finish(core, start)
    core.observe(join("a", 8, version=1))
    assert tick(core) == (), "its replica has other weights than the present ones"
    core.observe(ev.WeightsChanged(0.0, 1))
    (start,) = [action for action in tick(core) if isinstance(action, StartChunk)]
    assert (start.replica_id, start.weights_version) == ("a", 1)


def test_two_batches_live_side_by_side_and_end_apart():
    core = core_of(r=40)
    submit(core, ev.GroupSpec("g", 10, 1, 10), batch_id="one")
    submit(core, ev.GroupSpec("h", 10, 1, 10), batch_id="two")
    one, two = tick(core)
    finish(core, two)
    assert [a.batch_id for a in tick(core) if isinstance(a, EmitGroup)] == ["two"]
    assert core.is_running(one.chunk_id) and core.counts() == {"waiting": 0, "running": 1, "held": 0, "batches": 1}


def begun(*samples: tuple[int, int, bool], group_id: str = "g") -> ev.GroupSpec:
    return ev.GroupSpec(group_id, 10, 3, 30, begun=tuple(ev.Begun(*sample) for sample in samples))


def test_a_begun_sample_continues_at_its_next_token():
    core = core_of(chunk_tokens=10, r=20)
    submit(core, begun((1, 12, False)))
    starts = tick(core)
    assert [(start.sample_id, start.start, start.max_tokens) for start in starts] == [
        ("g#0", 0, 10), ("g#1", 12, 10), ("g#2", 0, 10),
    ]  # fmt: skip
    finish(core, starts[1])
    assert [(start.start, start.max_tokens) for start in tick(core)] == [(22, 8)]


def test_a_sample_that_had_ended_before_ends_at_once():
    core = core_of(r=20)
    submit(core, begun((0, 30, False), (2, 4, True)))
    one, other, start = tick(core)
    assert [(end.sample_id, end.end) for end in (one, other)] == [("g#0", SampleEnd.LENGTH), ("g#2", SampleEnd.STOP)]
    assert start.sample_id == "g#1"
    finish(core, start)
    assert [type(action) for action in tick(core)] == [EndSample, EmitGroup]
    assert core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_batch_that_had_ended_before_needs_no_replica(ordering):
    core = core_of(ordering)
    submit(core, begun((0, 1, True), (1, 30, False), (2, 9, True)))
    assert [type(action) for action in tick(core)] == [EndSample, EndSample, EndSample, EmitGroup]
    core.observe(join("r", 20))
    assert tick(core) == () and core.counts()["batches"] == 0


@pytest.mark.parametrize(
    "samples", [((3, 1, False),), ((-1, 1, False),), ((0, 0, False),), ((0, 31, False),), ((0, 1, True), (0, 1, True))]
)
def test_samples_that_cannot_have_begun_so_are_refused(samples):
    core = core_of(r=20)
    with pytest.raises(ev.IllegalEvent, match="begun"):
        submit(core, begun(*samples))
    assert tick(core) == ()
    submit(core, begun())
    assert len(tick(core)) == 3


def test_views_have_each_value_under_its_name():
    """They are built by position, for speed."""
    spec = ev.GroupSpec("g", 101, 2, 102)
    group = Batch(ev.SamplesSubmitted(0.0, "b", (spec,)), 99).add(spec, 103)
    sample = group.samples[1]
    for value, field in enumerate(sorted(set(SampleView._fields) & set(Sample.__slots__) - {"sample_id", "index"})):
        setattr(sample, field, value)
    for field in SampleView._fields:
        owners = [owner for owner in (sample, group, group.spec) if hasattr(owner, field)]
        assert getattr(sample.view(), field) == getattr(owners[0], field), field
    group.running, group.chunks, group.finished_lengths, group.expected_tokens = 1, 2, (5, 6, 7), 4
    view = group.view()
    assert (view.running, view.finished, view.chunks, view.expected_tokens) == (1, 3, 2, 4)
    assert (view.group_id, view.arrival, view.samples, view.max_tokens) == ("g", 103, 2, 102)


@pytest.mark.parametrize(
    ("family", "like", "method", "answer", "wanted"),
    [
        ("chunking", FixedChunks, "tokens", 0, "tokens answered 0; an integer from 1 to"),
        ("chunking", FixedChunks, "tokens", float("nan"), "tokens answered nan; an integer"),
        ("lengths", MaxFinished, "expected", -1, "expected answered -1; an integer from 0"),
        ("placement", LeastKv, "choose", ("nobody", None), "choose answered 'nobody'; the id of a ready replica"),
        (
            "placement",
            LeastKv,
            "choose",
            ("small", None),
            "choose answered 'small'; the id of a ready",
        ),
        ("placement", LeastKv, "min_pull_tokens", "x" * 200, "min_pull_tokens answered 'x+[.]{3}; an integer from 0"),
        ("ordering", GroupStatic, "bind", "nobody", "bind answered 'nobody'; None or the id of a ready replica"),
        ("kv_on_update", Fresh, "kv_version", 1, "kv_version answered 1; an integer from 0 to 0 is wanted"),
        ("prefetch", NextUp, "look_ahead", None, "look_ahead answered None; an integer from 0"),
        ("tail", Hold, "wanted", (ReplicaGoal(3), None), "wanted.engines answered 3; an integer from 0 to 2"),
    ],
)
def test_an_answer_that_no_policy_may_give_is_named(family, like, method, answer, wanted):
    odd = type("Odd", (like,), {method: lambda *args: answer})()
    core = RolloutCore(Policies(**{family: odd}), limits=Limits(1, 2))
    core.observe(ev.ReplicaJoined(0.0, "large", 16, 64, 4, 0, 0, node_id="a"))
    core.observe(ev.ReplicaJoined(0.0, "small", 16, 1, 4, 0, 0, node_id="b"))
    with pytest.raises(WrongAnswer, match=f"^policy .*:Odd: {wanted}"):
        submit(core, ev.GroupSpec("g", 100, 4, 100))
        tick(core)


def opened(core: RolloutCore, *groups: ev.GroupSpec, is_open: bool = True) -> None:
    core.observe(ev.SamplesSubmitted(0.0, "b", groups, open=is_open))


def test_an_open_group_takes_samples_while_others_run_and_is_handed_out_once_closed():
    core = core_of(r=40)
    opened(core, ev.GroupSpec("g", 10, 1, 10, open=True))
    (first,) = tick(core)
    opened(core, ev.GroupSpec("g", 10, 2, 10, open=True))
    more = tick(core)
    assert [start.sample_id for start in (first, *more)] == ["g#0", "g#1", "g#2"]
    for start in (first, *more):
        finish(core, start)
    assert [type(action) for action in tick(core)] == [EndSample] * 3
    opened(core, ev.GroupSpec("g", 10, 0, 10))
    assert tick(core) == (EmitGroup("b", "g", "all samples have ended"),)
    assert core.knows_batch("b"), "it is open"
    opened(core, is_open=False)
    assert tick(core) == () and not core.knows_batch("b")


def test_a_sample_that_joins_a_bound_group_runs_where_its_mates_do():
    core = core_of("group_static", q=40, r=40)
    opened(core, ev.GroupSpec("g", 10, 1, 10, open=True))
    (first,) = tick(core)
    opened(core, ev.GroupSpec("g", 10, 3, 10, open=True))
    assert [start.replica_id for start in tick(core)] == 3 * [first.replica_id]


def test_a_sample_that_joins_is_expected_to_be_as_long_as_its_ended_mates():
    core = core_of(r=40)
    opened(core, ev.GroupSpec("g", 10, 1, 90, open=True))
    (start,) = tick(core)
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, 33, ev.ChunkEnd.STOP, 0))
    opened(core, ev.GroupSpec("g", 10, 1, 90, open=True))
    assert [action.expected_tokens for action in tick(core) if isinstance(action, StartChunk)] == [33]


@pytest.mark.parametrize("ordering", ["fcfs", "group_static"])
def test_groups_of_an_open_batch_are_bound_by_turns(ordering):
    core = core_of(ordering, q=40, r=40)
    for number in range(4):
        opened(core, ev.GroupSpec(f"g{number}", 10, 1, 10, open=True))
    assert sorted(start.replica_id for start in tick(core)) == ["q", "q", "r", "r"]


def test_a_cancelled_sample_ends_alone():
    core = core_of(chunk_tokens=10, r=2)
    submit(core, ev.GroupSpec("g", 10, 3, 30))
    (start,) = tick(core)
    core.observe(ev.SampleCancelled(0.0, "g#1"))
    core.observe(ev.SampleCancelled(0.0, "g#0"))
    end, abort = tick(core)
    assert (end.sample_id, end.end) == ("g#1", SampleEnd.CANCELLED)
    assert abort == AbortChunk(start.chunk_id, "r", False, "cancelled")
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, 3, ev.ChunkEnd.ABORTED, 0))
    end, after = tick(core)
    assert (end.sample_id, end.end, after.sample_id) == ("g#0", SampleEnd.CANCELLED, "g#2")
    core.observe(ev.SampleCancelled(0.0, "g#1"))
    assert tick(core) == ()


def test_a_cancelled_open_batch_is_over():
    core = core_of(r=40)
    opened(core, ev.GroupSpec("g", 10, 1, 10, open=True))
    (start,) = tick(core)
    finish(core, start)
    core.observe(ev.BatchCancelled(0.0, "b"))
    assert [type(action) for action in tick(core)] == [EndSample, EmitGroup] and not core.knows_batch("b")


def test_a_chunk_is_aborted_once_whatever_speaks_against_it():
    core = core_of(r=20)
    submit(core, ev.GroupSpec("g", 10, 1, 40))
    (start,) = tick(core)
    core.observe(ev.WeightsChanged(0.0, 1))
    core.observe(ev.SampleCancelled(0.0, "g#0"))
    core.observe(ev.BatchCancelled(0.0, "b"))
    assert [action.chunk_id for action in tick(core)] == [start.chunk_id]
    core.observe(ev.SampleCancelled(0.0, "g#0"))
    assert tick(core) == ()


def test_the_length_of_a_cancelled_sample_says_nothing_of_its_mates():
    core = core_of(r=40)
    opened(core, ev.GroupSpec("g", 10, 1, 90, open=True))
    (start,) = tick(core)
    core.observe(ev.SampleCancelled(0.0, "g#0"))
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, 7, ev.ChunkEnd.ABORTED, 0))
    opened(core, ev.GroupSpec("g", 10, 1, 90, open=True))
    end, start = tick(core)
    assert end.end is SampleEnd.CANCELLED and start.expected_tokens == 90


@pytest.mark.parametrize(("asked", "expected"), [(5, 5), (20, 8), (None, 8)])
def test_the_bound_of_a_chunk_is_the_lower_one_of_policy_and_request(asked, expected):
    core = core_of(chunk_tokens=8, r=20)
    submit(core, ev.GroupSpec("g", 10, 1, 40, chunk_tokens=asked))
    (start,) = tick(core)
    assert start.max_tokens == expected


def test_an_open_batch_keeps_little_of_what_it_has_handed_out():
    core = core_of(r=40)
    for number in range(KNOWN_PROMPTS + 10):
        opened(core, ev.GroupSpec(f"g{number}", 10, 1, 10))
        finish(core, tick(core)[-1])
        tick(core)
    (batch,) = core._buffer.batches.values()
    assert (len(batch.groups), batch.samples, len(batch.known_lengths)) == (0, 0, KNOWN_PROMPTS)
