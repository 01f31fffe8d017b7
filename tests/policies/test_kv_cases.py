"""Single stories of pooled KV: weights that change, a pool that fills up or is lost, and who is brought near."""

import pytest
from test_rollout_cases import core_of, join, submit, tick
from user_policies import HalfTheQueue, KeepYoung

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.kv_on_update import KvOnUpdate
from tailrace.policies.families.prefetch import NextUp, NoPrefetch, Prefetching
from tailrace.policies.families.registry import Policies, members
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, EmitGroup, EndSample, Prefetch, ReleaseKv, StartChunk
from tailrace.policies.protocol.events import IllegalEvent

UPDATES = [*(cls() for cls in members("kv_on_update").values()), KeepYoung(), KeepYoung(updates=0)]
PREFETCHES = [*(cls() for cls in members("prefetch").values()), NextUp(depth=3), HalfTheQueue()]


def turns(**knobs) -> RolloutCore:
    """A core under which everybody takes turns, in chunks of 10."""
    chunking = {"type": "fixed", "chunk_tokens": 10}
    return RolloutCore(Policies(ordering="user_policies:FewestFirst", chunking=chunking, **knobs))


def stored(core: RolloutCore, start: StartChunk, tokens: int, new_tokens: int | None = None, end="length") -> None:
    """The chunk has ended and the pool holds so much of its sample's context."""
    new_tokens = start.max_tokens if new_tokens is None else new_tokens
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, new_tokens, ev.ChunkEnd(end), start.weights_version, tokens))


def of(kind: type, actions: tuple) -> list:
    return [action for action in actions if isinstance(action, kind)]


# ---- the contracts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", UPDATES, ids=repr)
def test_kv_is_of_weights_between_the_first_and_the_present_and_new_samples_are_fresh(policy):
    assert isinstance(policy, KvOnUpdate)
    for present in range(4):
        assert policy.kv_version(present, present) == present
        assert all(first <= policy.kv_version(first, present) <= present for first in range(present))


@pytest.mark.parametrize("policy", PREFETCHES, ids=repr)
def test_nobody_looks_further_ahead_than_the_queue(policy):
    assert isinstance(policy, Prefetching)
    assert all(0 <= policy.look_ahead(waiting) <= waiting for waiting in range(9))


# ---- endings and updates -----------------------------------------------------------------------------


def test_what_ends_is_released_behind_its_end_and_the_prompt_before_the_group_goes_out():
    core = core_of(chunk_tokens=10, r=20)
    submit(core, ev.GroupSpec("g", 32, 2, 10), ev.GroupSpec("h", 32, 1, 10))
    first, second, other = tick(core)
    stored(core, first, 42)
    stored(core, second, 0)
    stored(core, other, 0)
    kinds = [(type(action), getattr(action, "sample_id", "")) for action in tick(core)]
    assert kinds == [
        (EndSample, "g#0"), (ReleaseKv, "g#0"), (EndSample, "g#1"), (ReleaseKv, None), (EmitGroup, ""),
        (EndSample, "h#0"), (EmitGroup, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(("policy", "kv_version"), [("fresh", 3), ("keep", 0)])
def test_new_weights_stop_a_chunk_which_goes_on_under_them_with_the_kv_of_the_policy(policy, kv_version):
    core = turns(kv_on_update=policy)
    core.observe(join("r", 20))
    submit(core, ev.GroupSpec("g", 16, 1, 30))
    (start,) = tick(core)
    core.observe(ev.WeightsChanged(0.0, 3))
    core.observe(ev.WeightsChanged(0.0, 3))
    (abort,) = tick(core)
    assert abort == AbortChunk(start.chunk_id, "r", policy == "keep", "weights 3 replace 0")
    stored(core, start, 20, 4, "aborted")
    core.observe(join("r", 20, version=3))
    *released, again = tick(core)
    assert (again.start, again.weights_version, again.kv_version) == (4, 3, kv_version)
    reasons = [release.reason for release in released]
    assert reasons == ([] if policy == "keep" else ["its KV is of weights 0; it goes on under 3"])


def test_a_sample_stopped_before_its_first_token_is_new_under_the_new_weights():
    core = turns(kv_on_update="keep")
    core.observe(join("r", 20))
    submit(core, ev.GroupSpec("g", 16, 1, 30))
    (start,) = tick(core)
    core.observe(ev.WeightsChanged(0.0, 1))
    core.observe(join("r", 20, version=1))
    stored(core, start, 16, 0, "aborted")
    release, again = tick(core)
    assert (release.sample_id, again.kv_version) == ("g#0", 1)


def test_kv_of_waiting_samples_becomes_stale_with_the_weights_unless_they_keep_it():
    for policy in ("fresh", "keep"):
        core = turns(kv_on_update=policy)
        core.observe(join("r", 20, max_running=1))
        submit(core, ev.GroupSpec("g", 16, 2, 30))
        (start,) = tick(core)
        stored(core, start, 26)
        tick(core)
        core.observe(ev.WeightsChanged(0.0, 1))
        released = [action.sample_id for action in of(ReleaseKv, tick(core))]
        assert released == (["g#0"] if policy == "fresh" else [])


# ---- a pool that is full, or lost --------------------------------------------------------------------


def waiting_core() -> RolloutCore:
    """g#1 to g#3 wait with 26 tokens stored, 10 of them their own; g#0 runs its second chunk."""
    core = turns()
    core.observe(join("r", 20, max_running=1))
    submit(core, ev.GroupSpec("g", 16, 4, 90))
    for _ in range(4):
        (start,) = tick(core)
        stored(core, start, 26)
    (start,) = tick(core)
    assert start.sample_id == "g#0"
    return core


def reported(core: RolloutCore, used: int, observed_at: float, now: float = 0.0, capacity=100) -> list[str]:
    core.observe(ev.PoolReported(now, capacity, used, observed_at))
    return [action.sample_id for action in of(ReleaseKv, core.decide(ev.Tick(now)))]


def test_a_full_pool_gives_up_who_is_needed_last_until_it_is_roomy():
    assert reported(waiting_core(), 90, 1.0) == [], "at nine tenths it is not full"
    assert reported(waiting_core(), 91, 1.0) == ["g#3", "g#2"], "11 tokens too many, 10 each"
    assert reported(waiting_core(), 100, 1.0) == ["g#3", "g#2"]
    assert reported(waiting_core(), 101, 1.0) == ["g#3", "g#2", "g#1"], "what runs keeps its KV"


def test_a_report_from_before_the_last_time_counts_not_and_one_from_behind_it_does():
    core = waiting_core()
    assert reported(core, 91, observed_at=4.0, now=5.0) == ["g#3", "g#2"]
    assert reported(core, 95, observed_at=4.9, now=5.5) == []
    assert reported(core, 95, observed_at=5.5, now=6.0) == ["g#1"]
    assert reported(core, 99, observed_at=5.4, now=6.0) == []


def test_a_report_that_comes_late_does_not_replace_a_newer_one():
    """Law 8: between two ticks the newest counts, in whatever order they come."""
    core = waiting_core()
    core.observe(ev.PoolReported(2.0, 100, 50, 2.0))
    assert reported(core, 100, observed_at=1.0, now=2.0) == []


def test_who_has_nothing_but_the_prompt_stored_has_nothing_to_give_up():
    """What is behind the prompt is the sample's; the prompt's KV is its group's."""
    core = turns()
    core.observe(join("r", 20, max_running=1))
    submit(core, ev.GroupSpec("g", 16, 2, 90))
    for tokens in (17, 16):
        (start,) = tick(core)
        stored(core, start, tokens)
    (start,) = tick(core)
    assert start.sample_id == "g#0", "and g#1 waits"
    assert reported(core, 100, 1.0) == []


def test_who_has_one_token_behind_the_prompt_gives_it_up():
    core = turns()
    core.observe(join("r", 20, max_running=1))
    submit(core, ev.GroupSpec("g", 16, 2, 90))
    for tokens in (16, 17):
        (start,) = tick(core)
        stored(core, start, tokens)
    (start,) = tick(core)
    assert start.sample_id == "g#0" and reported(core, 100, 1.0) == ["g#1"]


def test_what_is_lost_is_not_released_and_what_is_stored_behind_it_is():
    core = waiting_core()
    core.observe(ev.KvLost(0.0, ("g#1", "nobody")))
    assert reported(core, 200, 1.0) == ["g#3", "g#2"]
    core.observe(ev.KvLost(0.0, None))
    core.observe(ev.BatchCancelled(0.0, "b"))
    assert of(ReleaseKv, tick(core)) == []
    core.observe(ev.ChunkFinished(0.0, "g#0:1", 10, ev.ChunkEnd.ABORTED, 0, 36))
    assert [action.sample_id for action in of(ReleaseKv, tick(core))] == ["g#0", None]


def test_more_stored_than_there_is_cannot_be():
    core = turns()
    core.observe(join("r", 20))
    submit(core, ev.GroupSpec("g", 16, 1, 30))
    (start,) = tick(core)
    with pytest.raises(IllegalEvent, match="27 tokens stored, of a context of 26"):
        stored(core, start, 27)
    stored(core, start, 26)


# ---- who is brought near ------------------------------------------------------------------------------


def two_nodes(prefetch, *nodes: str, **knobs) -> tuple[RolloutCore, list[StartChunk]]:
    """Samples 0 to 2 wait with KV from replica a, on node n1; the next tick starts 3 on a, 4 on b and 5 on c."""
    core = turns(prefetch=prefetch, **knobs)
    core.observe(ev.ReplicaJoined(0.0, "a", 16, 20, 3, 0, 0, "n1"))
    submit(core, ev.GroupSpec("g", 16, 6, 90))
    first = tick(core)
    for start in first:
        stored(core, start, 26)
    for replica_id, node_id in zip("bc", nodes, strict=True):
        core.observe(ev.ReplicaJoined(0.0, replica_id, 16, 20, 1, 0, 0, node_id))
    core.observe(ev.ReplicaLeft(0.0, "a", "gone"))
    core.observe(ev.ReplicaJoined(0.0, "a", 16, 20, 1, 0, 0, "n1"))
    return core, first


def test_next_up_brings_the_first_to_the_node_whose_chunk_ends_first():
    core, _ = two_nodes("next_up", "n2", "n3")
    actions = tick(core)
    running = {start.replica_id: start for start in of(StartChunk, actions)}
    assert of(Prefetch, actions) == [], "all have 10 tokens to go, and a, where its KV lies, is first by its chunk's id"
    core.observe(ev.TokensStreamed(1.0, {running["c"].chunk_id: 5}, 1.0))
    assert tick(core) == (), "neither who runs nor who is first has changed"
    stored(core, running["b"], 26)
    actions = tick(core)
    assert [(p.sample_id, p.replica_id) for p in of(Prefetch, actions)] == [("g#1", "c")]
    stored(core, running["a"], 26)
    assert "g#1" in [start.sample_id for start in of(StartChunk, tick(core))]


def test_a_greater_depth_gives_the_second_in_order_the_second_place():
    core, _ = two_nodes({"type": "next_up", "depth": 2}, "n2", "n3")
    actions = tick(core)
    assert [(p.sample_id, p.replica_id) for p in of(Prefetch, actions)] == [("g#1", "b")], "g#0's place is on a"
    stored(core, of(StartChunk, actions)[1], 26)
    actions = tick(core)
    assert [start.sample_id for start in of(StartChunk, actions)] == ["g#0"]
    assert [(p.sample_id, p.replica_id) for p in of(Prefetch, actions)] == [], "g#1's is on b, for which it was asked"


def test_nobody_is_brought_to_a_replica_that_still_holds_other_weights():
    """The chunk on b has fewest tokens to go; b itself has to load the new weights before it takes anybody."""
    core, _ = two_nodes("next_up", "n2", "n3", kv_on_update="keep")
    running = {start.replica_id: start for start in of(StartChunk, tick(core))}
    core.observe(ev.TokensStreamed(1.0, {running["b"].chunk_id: 9}, 1.0))
    core.observe(ev.WeightsChanged(1.0, 1))
    for replica_id in "ac":
        stored(core, running[replica_id], 22, 6, "aborted")
        core.observe(join(replica_id, 20, version=1))
    actions = tick(core)
    assert [start.replica_id for start in of(StartChunk, actions)] == ["a", "c"]
    assert "b" not in [prefetch.replica_id for prefetch in of(Prefetch, actions)]
    stored(core, running["b"], 26)
    core.observe(join("b", 20, version=1))
    assert [start.replica_id for start in of(StartChunk, tick(core))] == ["b"]


def test_a_bound_sample_is_brought_to_its_home_alone():
    """Two samples are bound to a; when it leaves, both go to b, which takes one at a time."""
    core = RolloutCore(Policies(ordering="group_static", chunking={"type": "fixed", "chunk_tokens": 10}))
    core.observe(ev.ReplicaJoined(0.0, "a", 16, 20, 2, 0, 0, "n1"))
    submit(core, ev.GroupSpec("g", 16, 2, 30))
    for start in tick(core):
        stored(core, start, 26)
    core.observe(ev.ReplicaLeft(0.0, "a", "gone"))
    core.observe(ev.ReplicaJoined(0.0, "b", 16, 20, 1, 0, 0, "n2"))
    core.observe(ev.ReplicaJoined(0.0, "c", 16, 20, 1, 0, 1, "n1"))  # of other weights: nothing is bound to it
    start, prefetch = tick(core)
    assert (start.sample_id, start.replica_id) == ("g#0", "b")
    assert (prefetch.sample_id, prefetch.replica_id) == ("g#1", "b")
    stored(core, start, 36)
    (again,) = tick(core)
    assert again.sample_id == "g#0", "g#1 waits on, and was asked for already"


@pytest.mark.parametrize(("prefetch", "nodes"), [("off", ("n2", "n3")), ("next_up", ("n1", "n1"))])
def test_nothing_is_fetched_ahead_when_it_is_off_or_all_share_one_node(prefetch, nodes):
    core, _ = two_nodes(prefetch, *nodes)
    for _ in range(12):
        actions = tick(core)
        assert of(Prefetch, actions) == []
        for start in of(StartChunk, actions):
            stored(core, start, 26)
    assert isinstance(NoPrefetch(), Prefetching)
