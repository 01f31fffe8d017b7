"""Fastest-of-N: what an assignment may never do, over random cases, and what the ladder says."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from performances import performance

from tailrace.policies.families.racing import FastestOfN, FreeWorker, MethodProfile, MethodTable, Straggler

NGRAM = MethodProfile("ngram", ((0.0, 0.9), (0.5, 1.3), (1.0, 4.0)), (0.1, 0.2, 0.3, 0.8))
SMALL = MethodProfile("0.5b", ((0.0, 0.7), (1.0, 2.7)), (0.6, 0.7, 0.8))
LARGE = MethodProfile("1.5b", ((0.0, 0.5), (1.0, 2.1)), (0.7, 0.8, 0.9))
LADDER = MethodTable((NGRAM, SMALL, LARGE))
METHODS = [rung.method for rung in LADDER.rungs]

stragglers = st.lists(
    st.builds(
        Straggler,
        st.integers(0, 99).map("s{}".format),
        st.integers(0, 20).map(lambda n: n / 20),
        st.lists(st.sampled_from(METHODS), unique=True).map(tuple),
        st.integers(0, 5).map("r{}".format),
    ),
    unique_by=lambda sample: sample.sample_id,
    max_size=12,
)
workers = st.lists(
    st.builds(
        FreeWorker,
        st.integers(0, 9).map("r{}".format),
        st.sampled_from(METHODS),
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    unique_by=lambda worker: worker.worker_id,
    max_size=10,
)


@settings(max_examples=60)
@given(stragglers, workers, st.sampled_from([1.0, 1.1]), st.randoms())
def test_an_assignment_keeps_every_law(samples, free, min_gain, shuffler):
    policy = FastestOfN(min_gain=min_gain, rungs=LADDER.rungs)
    copies = policy.assign(samples, free)
    shuffled = [list(samples), list(free)]
    for each in shuffled:
        shuffler.shuffle(each)
    assert policy.assign(*shuffled) == copies, "the order in which they are named changes nothing"

    by_id = {worker.worker_id: worker for worker in free}
    sample_of = {sample.sample_id: sample for sample in samples}
    load = Counter(copy.worker_id for copy in copies)
    assert all(by_id[worker_id].load + taken <= by_id[worker_id].room for worker_id, taken in load.items())
    methods = Counter((copy.sample_id, copy.method) for copy in copies)
    methods.update((sample.sample_id, method) for sample in samples for method in sample.methods)
    assert all(times == 1 for times in methods.values())
    assert all(by_id[copy.worker_id].method == copy.method for copy in copies)
    assert all(copy.worker_id != sample_of[copy.sample_id].replica for copy in copies)

    order = [(sample_of[copy.sample_id].acceptance, copy.sample_id) for copy in copies]
    assert order == sorted(order), "draft-first: a sample has all its methods before the next has any"
    if min_gain == 1.0:
        full = {id_ for id_, worker in by_id.items() if worker.load + load[id_] >= worker.room}
        for sample in samples:
            lacks = {m for m in METHODS if (sample.sample_id, m) not in methods}
            open_to_it = [w for w in free if w.method in lacks and w.worker_id not in full | {sample.replica}]
            assert not open_to_it, "a free place that a sample could use stays empty"


def test_the_least_loaded_worker_takes_the_copy_and_ties_go_by_id():
    free = [FreeWorker("b", "ngram", 1, 9), FreeWorker("c", "ngram", 0, 9), FreeWorker("a", "ngram", 1, 9)]
    samples = [Straggler(f"s{i}", 0.1 * i, ("0.5b",), "r") for i in range(4)]
    copies = FastestOfN(rungs=LADDER.rungs).assign(samples, free)
    assert [(copy.sample_id, copy.worker_id) for copy in copies] == [("s0", "c"), ("s1", "a"), ("s2", "b"), ("s3", "c")]


def test_a_place_too_few_goes_to_the_sample_that_accepts_least_and_its_best_method():
    samples = [Straggler("good", 0.9, (), "r"), Straggler("bad", 0.2, (), "r")]
    free = [FreeWorker("w", "0.5b", 0, 1), FreeWorker("x", "1.5b", 0, 1)]
    copies = FastestOfN(rungs=LADDER.rungs).assign(samples, free)
    assert [(copy.sample_id, copy.method) for copy in copies] == [("bad", "0.5b"), ("bad", "1.5b")]


def test_a_copy_that_hardly_helps_is_made_only_where_any_is_wanted():
    """No sample of the profile was faster with the large model than this one is with the small."""
    sample = [Straggler("s", 0.95, ("0.5b",), "r")]
    free = [FreeWorker("w", "1.5b", 0, 1)]
    assert LARGE.gain(SMALL.speedup(0.95)) == 1.0
    assert FastestOfN(rungs=LADDER.rungs).assign(sample, free)
    assert not FastestOfN(min_gain=1.01, rungs=LADDER.rungs).assign(sample, free)
    slow = [Straggler("s", 0.1, ("0.5b",), "r")]
    assert FastestOfN(min_gain=1.5, rungs=LADDER.rungs).assign(slow, free)


def test_the_first_choice_is_the_fastest_at_the_mean_acceptance():
    assert LADDER.first_choice() == "0.5b"
    assert LADDER.first_choice({"ngram": 0.9}) == "ngram"
    assert LADDER.first_choice({"ngram": 0.1, "0.5b": 0.1, "1.5b": 0.1}) is None, "plain decoding is faster than all"
    assert MethodTable(()).first_choice() is None


def test_speedups_rise_with_acceptance_between_the_points_measured():
    values = [NGRAM.speedup(rate / 20) for rate in range(21)]
    assert values == sorted(values)
    assert (NGRAM.speedup(-1), NGRAM.speedup(0.25), NGRAM.speedup(0.5), NGRAM.speedup(2)) == (0.9, 1.1, 1.3, 4.0)


def test_racing_with_all_methods_gains_what_each_adds_to_those_before():
    alone = NGRAM.speedup(0.2)
    first = SMALL.gain(alone)
    assert LADDER.gain("ngram", 0.2) == pytest.approx(first * LARGE.gain(alone * first))
    assert [rung.method for rung in LADDER.others("ngram")] == ["0.5b", "1.5b"]
    assert LADDER.gain("ngram", 1.0) == 1.0, "nothing is faster"
    assert LADDER.speedup("nobody knows", 0.5) == 1.0, "plain decoding"


def test_without_rungs_gains_are_those_of_the_measured_steps_and_drafts():
    """Steps of 20 ms whatever they verify; a draft model takes 20 ms a token, or 1 ms."""
    chances = {"group": 0.6, "model": 0.8}.get
    for draft_s, pays in ((0.02, False), (0.001, True)):
        known = performance(base=0.02, chunk=0.0, drafter_samples=(1.0, 2.0), drafter_seconds=(draft_s, draft_s))
        table = FastestOfN().informed(known, chances).method_table
        group, model = table.rungs
        assert (group.method, group.profile, model.method, model.profile) == ("group", (0.6,), "model", (0.8,))
        assert group.speedup(0.6) == pytest.approx((1 - 0.6**17) / 0.4, rel=1e-6)
        assert (model.speedup(0.8) > 2) == pays and model.speedup(0.0) == 1.0
    never_ran = FastestOfN().informed(performance(), chances).method_table.rungs[1]
    assert never_ran.curve == FastestOfN().method_table.rungs[1].curve and never_ran.profile == (0.8,)
    given = FastestOfN(rungs=LADDER.rungs)
    assert given.informed(known, chances) is given and FastestOfN().informed(None, chances).rungs is None


def test_a_ladder_of_some_methods_has_their_rungs_alone():
    assert LADDER.among(("1.5b", "ngram", "unheard of")).rungs == (NGRAM, LARGE)
    assert LADDER.among(()).rungs == ()


def test_a_policy_with_a_method_twice_is_refused():
    with pytest.raises(ValueError, match="named twice"):
        FastestOfN(rungs=(NGRAM, NGRAM))


@pytest.mark.parametrize("build", [lambda: MethodTable((NGRAM, NGRAM)), lambda: MethodProfile("x", (), (0.1,)),
                                   lambda: MethodProfile("x", ((0.5, 1.0), (0.5, 2.0)), (0.1,)),
                                   lambda: MethodProfile("x", ((0.5, 1.0),), ())])  # fmt: skip
def test_a_ladder_that_makes_no_sense_is_refused(build):
    with pytest.raises(ValueError):
        build()
