"""Tail policies: the contract every one keeps, the user's own included, what each one means, and how the core obeys."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from performances import measured, performance
from rollout_machine import play

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies, load_policy, members
from tailrace.policies.families.tail import Auto, Consolidate, Draft, Hold, Release, ReplicaGoal, Threshold, fewest
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, EndSample, SampleEnd, SetReplicas, StartChunk
from tailrace.policies.protocol.performance import Performance
from tailrace.policies.protocol.views import RacesView, ReplicaView, RolesView, TailView

PROFILE = settings(max_examples=40, derandomize=True, deadline=None, database=None)
EVERY = [*members("tail"), "user_policies:OneForEight"]
SPEEDS = performance()


def replica(name: str, running: int, known: Performance | None = SPEEDS, used: int = 0) -> ReplicaView:
    return ReplicaView(name, 1_000, 1_000 - used, running, 8, 0, "n", known)


def tail(
    *replicas: ReplicaView,
    now=0.0,
    waiting=0,
    unended=None,
    submitted=64,
    min_replicas=1,
    max_replicas=4,
    races=RacesView(),  # noqa: B008
    roles=(),
) -> TailView:
    running = sum(one.running for one in replicas)
    unended = running + waiting if unended is None else unended
    return TailView(now, waiting, running, unended, submitted, replicas, min_replicas, max_replicas, races, roles)


def auto(view: TailView, worth: float = 1.0, answer: ReplicaGoal | None = None) -> ReplicaGoal:
    return Auto(worth=worth).cut(view, answer or ReplicaGoal(view.max_replicas))


def engines(view: TailView, worth: float = 1.0) -> int:
    """Where no draft model is wanted."""
    wanted = auto(view, worth)
    assert not wanted.drafters
    return wanted.engines


# ---- the contract ----------------------------------------------------------------------------------


@PROFILE
@given(
    data=st.lists(st.tuples(*[st.integers(0, 8)] * 4), min_size=1, max_size=8),
    limits=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
@pytest.mark.parametrize("name", EVERY)
def test_every_member_stays_within_the_limits_and_repeats_itself(name, data, limits):
    policy, memories = load_policy("tail", name), [None, None]
    least, most = limits[0], max(1, sum(limits))
    for step, (first, second, waiting, more) in enumerate(data):
        replicas = [replica(f"r{i}", n) for i, n in enumerate((first, second)[: 1 + more % 2])]
        view = tail(*replicas, now=0.3 * step, waiting=waiting, min_replicas=least, max_replicas=most)
        answers = [policy.wanted(view, memory) for memory in memories]
        assert answers[0] == answers[1] and least <= answers[0][0].engines <= sum(answers[0][0]) <= most
        memories = [memory for _, memory in answers]


SHRINKING = ["release", "consolidate", "draft", "threshold", "auto"]


@PROFILE
@given(
    data=st.lists(st.tuples(*[st.integers(0, 8)] * 3, st.floats(1.0, 4.0)), min_size=2, max_size=20),
    slope_s=st.floats(0.0, 0.1),
)
@pytest.mark.parametrize("name", SHRINKING)
def test_while_a_batch_only_shrinks_nobody_is_asked_back(name, data, slope_s):
    """Whatever speeds and races do meanwhile: starting a replica takes longer than they stay as they are."""
    policy, memory, unended, answers = load_policy("tail", name), None, 8 * len(data) + 16, []
    for step, (first, second, third, gain) in enumerate(data):
        speeds = performance(chunk=slope_s * third)
        replicas = [replica("r0", 1 + first, speeds), replica("r1", second, speeds), replica("r2", third)]
        roles = tuple(RolesView(n, 1 + third % 2, gain) for n in (1, 2))
        races = RacesView(4, third % 3, gain)
        view = tail(*replicas, now=0.7 * step, unended=unended - 8 * step, races=races, roles=roles)
        wanted, memory = policy.wanted(view, memory)
        answers.append(wanted)
    assert all(later.engines <= before.engines and sum(later) <= sum(before) for before, later in pairwise(answers))


@pytest.mark.parametrize("name", SHRINKING)
def test_whatever_waits_brings_all_back_at_once_and_no_work_leaves_the_least(name):
    policy = load_policy("tail", name)
    wanted, memory = policy.wanted(tail(replica("r0", 0), unended=0, min_replicas=0), None)
    assert wanted == (0, 0)
    wanted, memory = policy.wanted(tail(replica("r0", 8), waiting=1, now=0.1), memory)
    assert wanted == (4, 0)
    wanted, memory = policy.wanted(tail(replica("r0", 0), unended=0, now=0.2), memory)
    assert wanted == (4, 0)  # not for a moment's lull
    wanted, memory = policy.wanted(tail(replica("r0", 0), unended=0, now=1.2), memory)
    assert wanted == (1, 0)


# ---- what each one means ---------------------------------------------------------------------------


def test_hold_keeps_all():
    assert Hold().wanted(tail(replica("r0", 0), unended=0), None)[0] == (4, 0)


def test_release_lets_go_only_of_what_serve_would_stop_before_a_busy_replica():
    four = tail(replica("r0", 1), replica("r1", 0), replica("r2", 1), replica("r3", 0))
    assert Release().needed(four, 4) == 3


def test_release_waits_for_those_that_start():
    assert Release().needed(tail(replica("r0", 1)), 4) == 4 and Release().needed(tail(replica("r0", 1)), 1) == 1


def test_consolidate_takes_the_fewest_on_which_steps_stay_short():
    four = [replica(f"r{i}", 2) for i in range(4)]  # 8 chunks; a step of 2 takes 22 ms, of 4 24, of 8 28
    assert Consolidate(max_slowdown=0.0).needed(tail(*four), 4) == 4
    assert Consolidate(max_slowdown=0.1).needed(tail(*four), 4) == 2
    assert Consolidate(max_slowdown=0.3).needed(tail(*four), 4) == 1


def test_consolidate_leaves_room_for_all_chunks_and_their_kv():
    assert fewest([replica("r0", 5), replica("r1", 5)], 10, 2, 9.0) == 2  # of places there are 8
    assert fewest([replica("r0", 1, used=400), replica("r1", 1, used=400)], 2, 2, 9.0) == 1
    assert fewest([replica("r0", 1, used=500), replica("r1", 1, used=500)], 2, 2, 9.0) == 2
    assert fewest([replica("r0", 1, None), replica("r1", 1, None)], 2, 2, 9.0) == 2  # nothing is known of steps


def test_threshold_looks_at_how_many_samples_are_left():
    policy = Threshold(at_share=0.25, to_share=0.5)
    assert policy.needed(tail(replica("r0", 8), unended=16), 4) == 4
    assert policy.needed(tail(replica("r0", 8), unended=15), 4) == 2


def test_auto_weighs_the_time_that_a_replica_saves_against_what_it_is_worth_elsewhere():
    """8 chunks: a step takes 28 ms on one replica, 24 on two, on three 23 for six and 22 for two, 22 on four."""
    four = tail(*[replica(f"r{i}", 2) for i in range(4)])
    assert engines(four, 0.0) == engines(four, Auto().worth) == 4
    assert engines(four, 0.24) == 3, "the fourth saves 0.75 ms, and is worth 1.3"
    assert engines(four, 0.4) == 2, "the third saves 1.25 ms, and is worth 2.3"
    assert engines(four, 1.0) == 1
    kept = [engines(four, worth / 25) for worth in range(40)]
    assert kept == sorted(kept, reverse=True)


def test_auto_gives_back_by_default_what_hardly_makes_a_step_longer():
    """8 chunks on one replica or on four are 6 ms of a step: two stay where it takes 60, one where it takes 600."""
    longer, longest = (performance(base=base_s) for base_s in (0.06, 0.6))
    assert engines(tail(*[replica(f"r{i}", 2, longer) for i in range(4)]), Auto().worth) == 2
    assert engines(tail(*[replica(f"r{i}", 2, longest) for i in range(4)]), Auto().worth) == 1


def test_auto_moves_chunks_only_for_a_rest_that_is_longer_than_the_move():
    """Two chunks on two replicas; on one a step takes 22 ms, not 21, which is worth a replica for 1,000 tokens."""
    view = tail(replica("r0", 1), replica("r1", 1), max_replicas=2)._replace(left_tokens=1_000)
    assert engines(view) == engines(view._replace(move_s=1.0)) == 1
    assert engines(view._replace(left_tokens=40, move_s=2.0)) == 2
    idle = tail(replica("r0", 2), replica("r1", 0), max_replicas=2)._replace(left_tokens=40, move_s=2.0)
    assert engines(idle) == 1, "nothing has to move"


def test_steps_that_bring_several_tokens_leave_less_time_for_a_move():
    def of(made):
        known = performance(made=made)
        both = [replica("r0", 1, known), replica("r1", 1, known)]
        return engines(tail(*both, max_replicas=2)._replace(left_tokens=400, move_s=1.0))

    assert of(1.0) == 1 and of(8.0) == 2


def test_auto_keeps_a_replica_that_would_start_for_longer_than_the_rest_takes():
    """Eight chunks on two replicas: 24 ms a step, 28 on one. Given back, a replica is of use again after its start."""

    def of(start_s, left_tokens):
        known = performance(start_s=start_s)
        both = [replica("r0", 4, known), replica("r1", 4, known)]
        return engines(tail(*both, max_replicas=2)._replace(left_tokens=left_tokens))

    assert of(0.0, 500) == 1 and of(60.0, 500) == 2 and of(60.0, 100_000) == 1


def test_auto_starts_no_draft_model_for_a_rest_that_ends_before_it_is_up():
    known = performance(start_s=60.0)
    alone, roles = [replica("r0", 1, known), *(replica(f"r{i}", 0, known) for i in (1, 2, 3))], (RolesView(1, 1, 1.6),)
    for left_tokens, wanted in ((500, 0), (100_000, 1)):
        view = tail(*alone, roles=roles)._replace(left_tokens=left_tokens)
        assert auto(view, worth=0.4).drafters == wanted
    up = ReplicaGoal(1, 1)
    assert auto(tail(*alone[:1], roles=roles)._replace(left_tokens=500), 0.4, up) == up, "it runs already"


def test_auto_keeps_what_races_are_worth():
    """One straggler: by itself on one replica, unless a copy on a second one is expected to bring more than that."""
    alone = [replica("r0", 1), *(replica(f"r{i}", 0) for i in (1, 2, 3))]
    for gain, copies, kept in ((1.0, 1, 1), (1.1, 1, 1), (2.0, 1, 2), (9.0, 3, 4)):
        assert engines(tail(*alone, races=RacesView(1, copies, gain))) == kept
    full = [replica(f"r{i}", 4) for i in range(4)]
    without = engines(tail(*full), 0.24)
    assert engines(tail(*full, races=RacesView(4, 0, 1.0)), 0.24) == without, "no replica has room"


def test_auto_drafts_where_that_is_worth_its_replicas():
    """One straggler, which is as fast on one replica as on four."""
    alone = [replica("r0", 1), *(replica(f"r{i}", 0) for i in (1, 2, 3))]
    for gain, worth, wanted in ((1.1, 1.0, (1, 0)), (1.3, 1.0, (1, 1)), (1.3, 36.0, (1, 0)), (1.1, 0.2, (1, 1))):
        assert auto(tail(*alone, roles=(RolesView(1, 1, gain),)), worth) == wanted
    two = RolesView(1, 1, 1.5), RolesView(1, 2, 1.6)
    assert auto(tail(*alone, roles=two)) == (1, 1) and auto(tail(*alone, roles=two), 0.04) == (1, 2)


def test_auto_races_or_moves_where_that_brings_more_than_drafts():
    alone, roles = [replica("r0", 1), *(replica(f"r{i}", 0) for i in (1, 2, 3))], (RolesView(1, 1, 1.4),)
    assert auto(tail(*alone, races=RacesView(1, 1, 1.3), roles=roles)) == (1, 1)
    assert auto(tail(*alone, races=RacesView(1, 1, 1.5), roles=roles)) == (2, 0)
    slow = [replica(f"r{i}", 2, performance(chunk=0.1)) for i in range(4)]  # 4 replicas: 3.7 times
    roles = RolesView(1, 1, 1.3), RolesView(3, 1, 1.3)
    assert auto(tail(*slow, roles=roles), 0.4) == (4, 0), "engines for all chunks bring more"


def test_what_has_become_a_drafter_or_gone_does_not_come_back_for_drafts():
    view = tail(replica("r0", 1), replica("r1", 0), roles=(RolesView(1, 2, 9.0),))
    policy = Auto(after_s=0.0)
    for answer, wanted in (((4, 0), (1, 2)), ((1, 1), (1, 1)), ((1, 0), (1, 0)), ((2, 0), (1, 1))):
        assert policy.wanted(view, (ReplicaGoal(*answer), 0.0, 1))[0] == wanted


def test_auto_leaves_room_for_all_and_keeps_all_while_nothing_is_known():
    assert engines(tail(replica("r0", 5), replica("r1", 5), max_replicas=2), 9.0) == 2
    assert engines(tail(replica("r0", 1, used=500), replica("r1", 1, used=500), max_replicas=2), 9.0) == 2
    assert engines(tail(replica("r0", 1, None), replica("r1", 0, None), max_replicas=2), 9.0) == 2


# ---- how the core obeys ----------------------------------------------------------------------------

FAILS_AFTER_ITS_REPLICA_WAS_CLOSED = bytes.fromhex(
    "00000000000000000000000000000039000000000000cd00000000000091010000000d0000010000"
    "00000000a8000000000000000d00000000000035"
)
"""A replica of a bound group closes and is open again; a chunk of the group, which ran on, fails. With tail=hold."""


@pytest.mark.slow
@PROFILE
@given(
    data=st.binary(min_size=60, max_size=400), chunk_tokens=st.sampled_from((13, None)),
    ordering=st.sampled_from(("seer", "group_static")), placement=st.sampled_from(("least_kv", "pinned")),
    limits=st.sampled_from((Limits(0, 2), Limits(1, 4))),
)  # fmt: skip
@example(
    data=FAILS_AFTER_ITS_REPLICA_WAS_CLOSED, chunk_tokens=13, ordering="group_static", placement="least_kv",
    limits=Limits(0, 2),
)  # fmt: skip
@pytest.mark.parametrize("name", EVERY)
def test_the_laws_hold_while_replicas_come_and_go(name, data, chunk_tokens, ordering, placement, limits):
    chunking = {"type": "fixed", "chunk_tokens": chunk_tokens}
    policies = Policies(ordering=ordering, placement=placement, chunking=chunking, tail=load_policy("tail", name))
    played = play(policies, data, limits)
    assert not (played.starved or played.changed or played.stale or played.evicted or played.closed)
    submitted = [event for event, _ in played.steps if isinstance(event, ev.SamplesSubmitted)]
    assert len(played.actions(EndSample)) == sum(spec.samples for event in submitted for spec in event.groups)
    assert played.core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}
    assert not len(played.core._unassigned)
    running, there = {}, []
    for event, actions in played.steps:
        match event:
            case ev.ReplicaJoined(replica_id=replica_id) if replica_id not in there:
                there.append(replica_id)
            case ev.ReplicaLeft(replica_id=replica_id):
                there.remove(replica_id)
                running = {chunk: home for chunk, home in running.items() if home != replica_id}
            case ev.ChunkFinished(chunk_id=chunk_id) | ev.ChunkFailed(chunk_id=chunk_id):
                del running[chunk_id]
        running |= {action.chunk_id: action.replica_id for action in actions if isinstance(action, StartChunk)}
        for action in actions:
            if isinstance(action, SetReplicas) and action.replicas < len(there):
                assert len(there) - len(set(running.values())) >= len(there) - action.replicas


def core_of(tail_policy, replicas=2, samples=8, **knobs) -> tuple[RolloutCore, list]:
    """With a batch on it; and the actions of the first decision."""
    policies = Policies(chunking={"type": "fixed", "chunk_tokens": 100}, tail=tail_policy, **knobs)
    core = RolloutCore(policies, limits=Limits(1, 2))
    for index in range(replicas):
        core.observe(ev.ReplicaJoined(0.0, f"r{9 - index}", 16, 1_000, 4, 0, 0, "n"))
        core.observe(ev.ReplicaMeasured(0.0, f"r{9 - index}", SPEEDS))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, samples, 200),)))
    return core, core.decide(ev.Tick(0.0))


def starts(actions) -> dict[str, StartChunk]:
    return {action.sample_id: action for action in actions if isinstance(action, StartChunk)}


def asked(actions) -> list[int]:
    return [action.replicas for action in actions if isinstance(action, SetReplicas)]


def test_the_newest_replica_is_emptied_its_samples_go_on_elsewhere_and_then_it_is_let_go():
    core, actions = core_of(Consolidate(after_s=0.0, max_slowdown=1.0))
    assert asked(actions) == [2]
    running = starts(actions)
    on_newest = sorted(i for i, start in running.items() if start.replica_id == "r8")
    stay = sorted(set(running) - set(on_newest))
    for sample_id in [*stay[1:], on_newest[0]]:
        core.observe(ev.ChunkFinished(1.0, running[sample_id].chunk_id, 50, ev.ChunkEnd.STOP, 0))
    actions = core.decide(ev.Tick(1.0))
    moved = [action for action in actions if isinstance(action, AbortChunk)]
    assert sorted(action.chunk_id for action in moved) == sorted(running[i].chunk_id for i in on_newest[1:])
    assert all(action.keep_kv for action in moved) and not asked(actions)
    for action in moved:
        core.observe(ev.ChunkFinished(2.0, action.chunk_id, 30, ev.ChunkEnd.ABORTED, 0, 40))
    actions = core.decide(ev.Tick(2.0))
    assert {s.replica_id for s in starts(actions).values()} == {"r9"} and asked(actions) == [1]
    assert all(start.start == 30 for start in starts(actions).values())


def test_a_chunk_that_is_sooner_done_than_moved_stays_to_its_end():
    core, actions = core_of(Consolidate(after_s=0.0, max_slowdown=1.0), samples=4)
    running = starts(actions)
    actions = core.decide(ev.Tick(1.0))
    newest = sorted(start.chunk_id for start in running.values() if start.replica_id == "r8")
    assert sorted(a.chunk_id for a in actions if isinstance(a, AbortChunk)) == newest
    core, actions = core_of(Hold(), samples=4)
    core.observe(measured(0.5, "r8", 1.0, 0.0, 0.0, at=0.5))  # to compute a token takes 1 s
    core._scaling._policy = Consolidate(after_s=0.0, max_slowdown=1.0)
    assert not [a for a in core.decide(ev.Tick(1.0)) if isinstance(a, AbortChunk)]


def test_the_number_of_replicas_is_looked_at_once_in_a_quarter_of_a_second(monkeypatch):
    core, _ = core_of(Hold())
    looks = []
    monkeypatch.setattr(Hold, "wanted", lambda self, view, memory: (looks.append(view.now), (ReplicaGoal(2), None))[1])
    for now in (0.1, 0.2, 0.25, 0.3, 0.49, 0.5):
        core.decide(ev.Tick(now))
    assert looks == [0.25, 0.5]
    core.observe(ev.SamplesSubmitted(0.51, "c", (ev.GroupSpec("h", 10, 1, 200),)))
    core.decide(ev.Tick(0.51))
    assert looks == [0.25, 0.5, 0.51], "a new batch is looked at at once"


def test_a_new_batch_reopens_what_was_closing():
    core, actions = core_of(Consolidate(after_s=0.0, max_slowdown=1.0), samples=4)
    core.decide(ev.Tick(1.0))
    assert not core.replicas.stays("r8")
    core.observe(ev.SamplesSubmitted(1.1, "c", (ev.GroupSpec("h", 10, 4, 200),)))
    actions = core.decide(ev.Tick(1.1))
    assert "r8" in {start.replica_id for start in starts(actions).values()}


def test_groups_bound_to_a_replica_that_closes_are_bound_anew():
    core, actions = core_of(Threshold(after_s=0.0, at_share=1.0, to_share=0.5), samples=3, ordering="group_static")
    (home,) = {start.replica_id for start in starts(actions).values()}
    core.observe(ev.ChunkFinished(1.0, "g#0:0", 50, ev.ChunkEnd.STOP, 0))
    core.decide(ev.Tick(1.0))
    core.observe(ev.ChunkFinished(2.0, "g#1:0", 100, ev.ChunkEnd.LENGTH, 0))
    (start,) = starts(core.decide(ev.Tick(2.0))).values()
    assert home == "r8" and start.replica_id == "r9"


def test_without_limits_nobody_is_asked_for():
    core = RolloutCore(Policies(tail="release"))
    core.observe(ev.ReplicaJoined(0.0, "r", 16, 1_000, 4, 0, 0))
    assert not core.decide(ev.Tick(0.0)) and not core.decide(ev.Tick(9.0))


def test_before_the_first_batch_all_stay_and_a_reservation_brings_them_back():
    core = RolloutCore(Policies(tail=Release(after_s=0.0)), limits=Limits(0, 4))
    core.observe(ev.ReplicaJoined(0.0, "r", 16, 1_000, 4, 0, 0))
    assert not core.decide(ev.Tick(9.0))
    core.observe(ev.SamplesSubmitted(10.0, "b", (ev.GroupSpec("g", 10, 1, 200),)))
    assert asked(core.decide(ev.Tick(10.0))) == [4]
    core.observe(ev.ChunkFinished(11.0, "g#0:0", 5, ev.ChunkEnd.STOP, 0))
    assert asked(core.decide(ev.Tick(11.0))) == [0]
    core.observe(ev.ReplicasReserved(12.0, 3))
    assert asked(core.decide(ev.Tick(12.0))) == [3]
    core.observe(ev.SamplesSubmitted(13.0, "c", (ev.GroupSpec("h", 10, 1, 200),)))
    core.decide(ev.Tick(13.0))
    core.observe(ev.ChunkFinished(14.0, "h#0:0", 5, ev.ChunkEnd.STOP, 0))
    assert asked(core.decide(ev.Tick(14.0))) == [0], "only until the next batch has come"


def test_serve_stops_the_newest_on_the_node_with_the_fewest_first():
    core = RolloutCore(Policies())
    for name, node in (("a", "n1"), ("d", "n2"), ("c", "n1"), ("b", "n1"), ("e", "n2")):
        core.observe(ev.ReplicaJoined(0.0, name, 16, 1_000, 4, 0, 0, node))
    assert core.replicas.stop_order() == ["e", "d", "b", "c", "a"]


def test_samples_end_by_themselves_or_not_at_all():
    core, actions = core_of(Release(after_s=0.0), samples=2)
    for start in starts(actions).values():
        core.observe(ev.ChunkFinished(1.0, start.chunk_id, 5, ev.ChunkEnd.STOP, 0))
    actions = core.decide(ev.Tick(1.0))
    assert [a.end for a in actions if isinstance(a, EndSample)] == [SampleEnd.STOP] * 2 and asked(actions) == [1]


def test_where_replicas_have_gone_a_draft_model_runs_until_the_batch_has_ended():
    core, actions = core_of(Draft(after_s=0.0, max_slowdown=9.0), samples=3)
    running = starts(actions)
    (set_all,) = [action for action in actions if isinstance(action, SetReplicas)]
    assert (set_all.replicas, set_all.drafters) == (2, 0)
    for chunk in [a for a in core.decide(ev.Tick(1.0)) if isinstance(a, AbortChunk)]:
        core.observe(ev.ChunkFinished(1.5, chunk.chunk_id, 30, ev.ChunkEnd.ABORTED, 0, 40))
    actions = core.decide(ev.Tick(2.0))
    (one_left,) = [action for action in actions if isinstance(action, SetReplicas)]
    assert (one_left.replicas, one_left.drafters) == (1, 1)
    moved = starts(actions)
    for start in (running | moved).values():
        core.observe(ev.ChunkFinished(3.0, start.chunk_id, 9, ev.ChunkEnd.STOP, 0))
    (ended,) = [action for action in core.decide(ev.Tick(3.0)) if isinstance(action, SetReplicas)]
    assert (ended.replicas, ended.drafters) == (1, 0)


def test_a_group_that_can_never_fit_fails_though_its_replica_closes_as_it_is_bound():
    """The tick that binds it closes the replica: it is bound anew in the same tick, and not forgotten."""
    core = RolloutCore(Policies(ordering="group_static", tail=Consolidate(after_s=0.0)), limits=Limits(0, 1))
    for index in range(3):
        core.observe(ev.ReplicaJoined(0.0, f"r{index}", 16, 10, 4, 0, 0, "n"))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 9_000, 1, 400),)))
    (end,) = [action for action in core.decide(ev.Tick(0.0)) if isinstance(action, EndSample)]
    assert end.end is SampleEnd.FAILED


REOPENED = bytes.fromhex(
    "0d14000000000000000000000000140000000000010083000000000000c60000000000c6010001000000030000"
    "a800000000000000bf00000000000083000000000001a8000000000001"
)
"""A play in which replicas join, so that the one that was to go stays and takes a chunk in the same decision."""


def test_a_replica_that_a_decision_opens_again_may_take_chunks_at_once():
    policies = Policies(
        ordering="seer", placement="least_kv", chunking={"type": "fixed", "chunk_tokens": 13}, tail="auto", lanes="none"
    )
    played = play(policies, REOPENED, Limits(0, 2))
    starts = [str(action) for action in played.actions(StartChunk)]
    assert not played.closed and any("'r7'" in start for start in starts)


def test_a_replica_that_opens_again_starts_what_waits_in_the_same_decision():
    """Law 7. Three replicas where two may be: the newest closes; it opens again as another one is lost."""
    core = RolloutCore(Policies(placement="least_kv"), limits=Limits(0, 2))
    for name in ("a", "b", "c"):
        core.observe(ev.ReplicaJoined(0.0, name, 16, 1_000, 1, 0, 0))
    core.observe(ev.SamplesSubmitted(1.0, "b", (ev.GroupSpec("g", 10, 8, 100),)))
    first = {action.replica_id: action for action in core.decide(ev.Tick(1.0)) if isinstance(action, StartChunk)}
    assert set(first) == {"a", "b", "c"} and not core.replicas.stays("c")
    core.observe(ev.ChunkFinished(2.0, first["c"].chunk_id, 5, ev.ChunkEnd.STOP, 0))
    assert not [action for action in core.decide(ev.Tick(2.0)) if isinstance(action, StartChunk)]
    core.observe(ev.ReplicaLeft(3.0, "a", "lost"))
    (start,) = (action for action in core.decide(ev.Tick(3.0)) if isinstance(action, StartChunk))
    assert start.replica_id == "c"
