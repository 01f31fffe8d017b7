"""Orderings: what each one means, and the contract every one keeps, the user's own included."""

from itertools import pairwise, product

import pytest
from test_rollout_cases import finish, join, submit, tick
from user_policies import LastComeFirst

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.ordering import Fcfs, GroupStatic, OracleLongestFirst, Ordering, RemainingFirst, Seer
from tailrace.policies.families.registry import Policies, members
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.views import GroupView, SampleView

EVERY = [*(cls() for cls in members("ordering").values()), LastComeFirst(), Seer(explore=1.0), Seer(explore=0.0)]
EVERY += [RemainingFirst(patience=2)]


def sample(index=1, generated=0, group="g", arrival=0, expected=100, chunks=0) -> SampleView:
    return SampleView(
        f"{group}#{index}", group, arrival, index, 10, generated, 0, 0.0, 100, chunks, None, 0, expected
    )  # fmt: skip


def group(finished=0, expected=100, chunks=0, name="g") -> GroupView:
    return GroupView(name, 0, 8, 0, finished, chunks, 100, expected)


def keys_of(ordering: Ordering, view: SampleView, of: GroupView) -> tuple[tuple, ...]:
    if isinstance(ordering, OracleLongestFirst):
        return ordering.keys_of_length(view, {view.sample_id: 50 + view.index})
    return ordering.keys(view, of)


def one_by_one(ordering, *groups: ev.GroupSpec, chunk_tokens=None, length=None) -> list[str]:
    """Sample ids in the order a single slot runs their chunks. `length` tokens end a sample; None: its max_tokens."""
    core = RolloutCore(Policies(ordering=ordering, chunking={"type": "fixed", "chunk_tokens": chunk_tokens}))
    core.observe(join("r", 100, max_running=1))
    submit(core, *groups)
    order = []
    while starts := [action for action in tick(core) if isinstance(action, StartChunk)]:
        (start,) = starts
        assert start.max_tokens > 0, "or it would never end"
        order.append(start.sample_id)
        if length and start.sample_id in length and start.start + start.max_tokens >= length[start.sample_id]:
            new_tokens = length[start.sample_id] - start.start
            core.observe(ev.ChunkFinished(0.0, start.chunk_id, new_tokens, ev.ChunkEnd.STOP, 0))
        else:
            finish(core, start)
    return order


# ---- the contract ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ordering", EVERY, ids=lambda o: type(o).__name__)
def test_keys_are_tuples_of_numbers_one_per_lane_that_compare_over_all_samples(ordering):
    assert isinstance(ordering, Ordering)
    views = [sample(i, generated) for i in range(3) for generated in (0, 40)]
    groups = [group(), group(2, 30, 5), group(8, 100, 50)]
    keys = [keys_of(ordering, view, of) for view, of in product(views, groups)]
    assert {len(of_lanes) for of_lanes in keys} == {ordering.lanes}
    for lane in range(ordering.lanes):
        lane_keys = [of_lanes[lane] for of_lanes in keys]
        assert all(isinstance(key, tuple) and all(isinstance(x, int | float) for x in key) for key in lane_keys)
        assert sorted(lane_keys) == sorted(reversed(lane_keys))


@pytest.mark.parametrize("ordering", EVERY, ids=lambda o: type(o).__name__)
def test_the_lane_of_a_decision_exists_and_is_the_same_every_time(ordering):
    lanes = [ordering.lane(pick) for pick in range(200)]
    assert set(lanes) <= set(range(ordering.lanes))
    assert lanes == [type(ordering)(**ordering.model_dump()).lane(pick) for pick in range(200)]


@pytest.mark.parametrize("ordering", EVERY, ids=lambda o: type(o).__name__)
def test_a_group_is_bound_to_a_replica_that_was_offered_or_to_none(ordering):
    for groups, replicas in product((1, 2, 7), (["a"], ["a", "b", "c"])):
        assert {ordering.bind(number, groups, replicas) for number in range(groups)} <= {*replicas, None}


@pytest.mark.parametrize("ordering", EVERY, ids=lambda o: type(o).__name__)
def test_keys_only_grow_as_a_group_runs(ordering):
    """Between two finished samples the core renews no key, so none may get smaller by then."""
    for finished, expected in ((0, 100), (3, 40)):
        for index in (0, 1):
            keys = [keys_of(ordering, sample(index), group(finished, expected, chunks)) for chunks in range(5)]
            assert all(before <= after for before, after in pairwise(keys))


@pytest.mark.parametrize("ordering", EVERY, ids=lambda o: type(o).__name__)
def test_an_ordering_runs_everything(ordering):
    order = one_by_one(ordering, ev.GroupSpec("g", 10, 4, 100), ev.GroupSpec("h", 10, 3, 50), chunk_tokens=30)
    assert {sample_id: order.count(sample_id) for sample_id in order} == {
        **{f"g#{i}": 4 for i in range(4)}, **{f"h#{i}": 2 for i in range(3)},
    }  # fmt: skip


# ---- what each one means ----------------------------------------------------------------------------


def test_fcfs_goes_by_arrival_then_by_sample_and_ends_one_before_the_next():
    order = one_by_one(Fcfs(), ev.GroupSpec("z", 10, 2, 60), ev.GroupSpec("a", 10, 1, 60), chunk_tokens=30)
    assert order == ["z#0", "z#0", "z#1", "z#1", "a#0", "a#0"]


@pytest.mark.parametrize(("groups", "replicas"), [(8, 4), (9, 4), (3, 4), (1, 1), (100, 7), (16, 16)])
def test_group_static_cuts_the_batch_into_contiguous_equal_runs(groups, replicas):
    ids = [f"r{n:02}" for n in range(replicas)]
    homes = [GroupStatic().bind(number, groups, ids) for number in range(groups)]
    assert homes == sorted(homes)
    sizes = [homes.count(replica_id) for replica_id in ids]
    assert max(sizes) - min(sizes) <= 1


def test_group_static_starts_only_where_a_group_is_bound():
    core = RolloutCore(Policies(ordering="group_static", chunking={"type": "fixed", "chunk_tokens": None}))
    for replica_id in ("b", "a"):
        core.observe(join(replica_id, 100, max_running=1))
    submit(core, *(ev.GroupSpec(f"g{n}", 10, 1, 10) for n in range(4)))
    seen = []
    while starts := [action for action in tick(core) if isinstance(action, StartChunk)]:
        for start in starts:
            seen.append((start.sample_id, start.replica_id))
            finish(core, start)
    assert sorted(seen) == [("g0#0", "a"), ("g1#0", "a"), ("g2#0", "b"), ("g3#0", "b")]


def test_seer_runs_every_probe_first_the_one_with_fewest_tokens_before_the_others():
    """Algorithm 1, lines for S_spec: min over generated tokens."""
    groups = (ev.GroupSpec("g", 10, 2, 90), ev.GroupSpec("h", 10, 2, 90))
    order = one_by_one(Seer(explore=0.0), *groups, chunk_tokens=30)
    assert order[:6] == ["g#0", "h#0"] * 3


def test_seer_then_takes_the_group_with_the_greatest_finished_length():
    """Algorithm 1: L_g = greatest finished length; the mates of the long probe go before those of the short."""
    groups = tuple(ev.GroupSpec(name, 10, 3, 90) for name in ("short", "long", "middle"))
    length = {"short#0": 10, "long#0": 80, "middle#0": 40, "short#1": 85, "long#1": 20}
    order = one_by_one(Seer(explore=0.0), *groups, length=length)
    assert order[:3] == ["short#0", "long#0", "middle#0"]
    assert order[3:] == ["long#1", "long#2", "middle#1", "middle#2", "short#1", "short#2"]


def test_a_group_whose_lengths_are_unknown_counts_as_max_tokens():
    ordering, known, unknown = Seer(), group(3, 99), group()
    assert ordering.keys(sample(), unknown)[0] < ordering.keys(sample(), known)[0]
    assert ordering.keys(sample(), unknown)[0] == ordering.keys(sample(), group(1, 100))[0]


def test_a_finished_sample_changes_the_order_of_its_waiting_mates_at_once():
    """`b` is behind `a` by its probe (40 against 50), until `b#1` ends with 80 while mates of both wait."""
    core = RolloutCore(Policies(ordering=Seer(explore=0.0)))
    core.observe(join("r", 100, max_running=3))
    submit(core, ev.GroupSpec("b", 10, 4, 90), ev.GroupSpec("a", 10, 4, 90))
    assert [start.sample_id for start in tick(core)] == ["b#0", "a#0", "b#1"]
    for sample_id, tokens in (("b#0", 40), ("a#0", 50)):
        core.observe(ev.ChunkFinished(0.0, f"{sample_id}:0", tokens, ev.ChunkEnd.STOP, 0))
    assert [a.sample_id for a in tick(core) if isinstance(a, StartChunk)] == ["a#1", "a#2"]
    core.observe(ev.ChunkFinished(0.0, "b#1:0", 80, ev.ChunkEnd.STOP, 0))
    assert [a.sample_id for a in tick(core) if isinstance(a, StartChunk)] == ["b#2"]


def test_within_a_group_the_sample_with_most_tokens_goes_on():
    keys = Seer().keys
    assert keys(sample(2, generated=40), group(1, 50))[0] < keys(sample(1, generated=10), group(1, 50))[0]


@pytest.mark.parametrize("explore", [0.0, 0.1, 0.5, 1.0])
def test_seer_explores_in_about_the_share_it_is_told(explore):
    """2,000 draws: five standard deviations, and the draws are always the same."""
    share = sum(Seer(explore=explore).lane(pick) for pick in range(2_000)) / 2_000
    assert abs(share - explore) <= 5 * (explore * (1 - explore) / 2_000) ** 0.5


def test_another_seed_explores_at_other_decisions():
    lanes = [[Seer(explore=0.5, seed=seed).lane(pick) for pick in range(64)] for seed in (0, 1)]
    assert lanes[0] != lanes[1]


def test_who_is_explored_is_drawn_by_prompt_and_sample_whatever_the_batch_is_called():
    """So runs of the same prompts can be compared: when a long sample starts is not a matter of a batch's name."""
    views = [sample(index)._replace(sample_id=f"{{}}/p#{index}") for index in range(1, 9)]
    orders = [
        sorted(views, key=lambda view: Seer().keys(view._replace(sample_id=view.sample_id.format(batch)), group())[1])
        for batch in ("step-1", "step-2", "runs/a")
    ]
    assert orders[0] == orders[1] == orders[2] != views
    assert sorted(views, key=lambda view: Seer(seed=1).keys(view, group())[1]) != orders[0]


def test_exploring_goes_to_the_group_that_ran_least():
    """All decisions explore: after the probes, chunks alternate between groups although one is far longer."""
    groups = (ev.GroupSpec("g", 10, 3, 90), ev.GroupSpec("h", 10, 3, 90))
    order = one_by_one(Seer(explore=1.0), *groups, length={"g#0": 80, "h#0": 10})
    assert sorted(order[:2]) == ["g#0", "h#0"]
    later = [sample_id[0] for sample_id in order[2:]]
    assert later[0] != later[1] and later[2] != later[3]


def test_remaining_first_takes_who_has_most_left_and_not_who_is_longest():
    """Two samples of 90 expected tokens: the one that has made fewer goes first, and before one of 60 with none."""
    keys = RemainingFirst().keys
    order = [sample(1, 10, expected=90), sample(2, expected=60), sample(3, 50, expected=90)]
    assert sorted(order, key=lambda view: keys(view, group())[0]) == order
    assert keys(sample(0, 99), group())[0] < keys(order[0], group())[0], "probes go first"


def test_remaining_first_lets_a_finished_mate_change_who_is_next():
    """`b` has most left by its probe (80 against 40), until `a#1` ends with 90 while mates of both wait."""
    core = RolloutCore(Policies(ordering="remaining_first"))
    core.observe(join("r", 100, max_running=3))
    submit(core, ev.GroupSpec("a", 10, 4, 95), ev.GroupSpec("b", 10, 4, 95))
    assert [start.sample_id for start in tick(core)] == ["a#0", "b#0", "a#1"]
    for sample_id, tokens in (("a#0", 40), ("b#0", 80)):
        core.observe(ev.ChunkFinished(0.0, f"{sample_id}:0", tokens, ev.ChunkEnd.STOP, 0))
    assert [a.sample_id for a in tick(core) if isinstance(a, StartChunk)] == ["b#1", "b#2"]
    core.observe(ev.ChunkFinished(0.0, "a#1:0", 90, ev.ChunkEnd.STOP, 0))
    assert [a.sample_id for a in tick(core) if isinstance(a, StartChunk)] == ["a#2"]


@pytest.mark.parametrize("patience", [2, 3, 8])
def test_remaining_first_starves_nobody(patience):
    """The last of eight, and with least to make: it runs within `patience` decisions for each."""
    groups = [ev.GroupSpec("long", 10, 6, 900), ev.GroupSpec("short", 10, 2, 20)]
    order = one_by_one(RemainingFirst(patience=patience), *groups, chunk_tokens=10)
    assert order.index("short#1") < patience * len(set(order))
    never = one_by_one(RemainingFirst(patience=10_000), *groups, chunk_tokens=10)
    assert never.index("short#1") > order.index("short#1"), "without patience it waits for all the others"


def test_the_oracle_takes_the_longest_first():
    core = RolloutCore(Policies(ordering="oracle_longest_first"))
    core.observe(join("r", 100, max_running=4))
    core.observe(ev.LengthsRevealed(0.0, {"g#0": 5, "g#1": 70, "h#0": 30, "h#1": 99}))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, 2, 100), ev.GroupSpec("h", 10, 2, 100))))
    assert [start.sample_id for start in tick(core)] == ["h#1", "g#1", "h#0", "g#0"]


def test_the_oracle_has_no_keys_without_lengths():
    with pytest.raises(TypeError, match="only a simulation or a replay knows"):
        OracleLongestFirst().keys(sample(), group())
