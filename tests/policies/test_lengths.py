"""Length policies: the contract that every one keeps, the user's own included, what each one means, and the books."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_cases import join, submit, tick
from user_policies import Doubling

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.lengths import (
    HistoryQuantile,
    LengthClassEstimate,
    Lengths,
    MaxFinished,
    Shrunk,
    class_starts,
    length_class,
)
from tailrace.policies.families.registry import Policies, members
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.length_stats import LONG, PASS_SHARE, SHORT, batch_lengths, length_classes
from tailrace.policies.protocol.views import LengthsView

EVERY = [*(cls() for cls in members("lengths").values()), Doubling(), Shrunk(history_weight=0.0)]
MAX_TOKENS = 1000


def view(finished=(), running=(), history=(), prompts=None, max_tokens=MAX_TOKENS) -> LengthsView:
    """`prompts`: what the batch knows, (history, finished) each; by default this group alone."""
    known = [(history, finished)] if prompts is None else prompts
    return LengthsView(tuple(sorted(finished)), tuple(running), history, batch_lengths(known, max_tokens), max_tokens)


lengths_of = st.lists(st.integers(0, MAX_TOKENS), max_size=12).map(lambda values: tuple(sorted(values)))
epochs_of = st.lists(lengths_of, max_size=3).map(tuple)


@st.composite
def views(draw):
    finished, history = draw(lengths_of), draw(epochs_of)
    others = draw(st.lists(st.tuples(epochs_of, lengths_of), max_size=3))
    running = tuple(draw(st.lists(st.integers(0, MAX_TOKENS - 1), max_size=8)))
    return view(finished, running, history, [(history, finished), *others])


# ---- the contract ----------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, database=None)
@given(seen=views(), generated=st.integers(0, MAX_TOKENS - 1))
def test_an_expected_length_is_more_than_there_is_and_never_more_than_may_be(seen, generated):
    """Of every member, by one view: to draw it takes longer than to ask all of them."""
    for policy in EVERY:
        assert isinstance(policy, Lengths)
        expected = policy.expected(seen, generated)
        assert type(expected) is int and generated < expected <= MAX_TOKENS, policy
        assert expected == policy.expected(seen, generated), policy
        if not policy.reads_all:
            assert expected == policy.expected(seen._replace(running=(), batch=None), generated), policy


@pytest.mark.parametrize("policy", [cls() for cls in members("lengths").values()], ids=lambda p: type(p).__name__)
def test_what_nobody_knows_counts_as_the_longest(policy):
    """A potential straggler, as in Seer 4.3."""
    assert policy.expected(view(), 0) == MAX_TOKENS


# ---- what each one means ----------------------------------------------------------------------------


def test_max_finished():
    assert MaxFinished().expected(view((30, 70, 50)), 10) == 70
    assert MaxFinished().expected(view((30, 70, 50)), 70) == 71


def test_a_quantile_is_of_the_earlier_answers_that_got_as_far():
    """Newest epoch alone; who outlives it could be anything; without history, mates count."""
    seen = view((900,), history=((10, 20, 30, 40, 50), (500,)))
    expected = HistoryQuantile().expected
    assert [expected(seen, generated) for generated in (0, 10, 35, 49, 50)] == [30, 40, 50, 50, MAX_TOKENS]
    assert HistoryQuantile(quantile=1.0, epochs=2).expected(seen, 0) == 500
    assert expected(view((20, 60)), 0) == 60 and expected(view((20, 60), history=((),)), 0) == 60


def test_length_class_expects_what_is_typical_of_the_class_and_the_class_rises():
    """Short below 0.4 x 1000 tokens, medium below (400 + 1000) / 2."""
    past = (100,) * 8 + (120, 500, 510, 520, 900, 1000)
    seen = view(history=(past,))
    medium_at, long_at = class_starts(seen)
    assert 0 < medium_at <= 400 and medium_at <= long_at <= 700
    assert LengthClassEstimate().expected(seen, 0) == 100
    assert LengthClassEstimate().expected(seen, medium_at) == 510
    assert LengthClassEstimate().expected(seen, long_at) == 1000
    assert [length_class(seen, g) for g in (0, medium_at - 1, medium_at, long_at - 1, long_at)] == [0, 0, 1, 1, 2]


def test_ours_expects_the_mean_of_what_is_left_where_prompts_do_not_differ():
    """Log-normal answers, all prompts alike: against the mean of those that got as far, of 20,000 answers."""
    rng = np.random.default_rng(0)
    answers = np.exp(5 + 0.5 * rng.standard_normal((40, 500)))
    prompts = [((tuple(sorted(map(int, row))),), ()) for row in answers]
    seen = view(history=((150,),), prompts=prompts, max_tokens=10_000)
    for generated in (0, 100, 200, 400):
        true = answers[answers > generated].mean()
        assert Shrunk().expected(seen, generated) == pytest.approx(true, rel=0.1)


def test_ours_goes_by_a_prompt_s_own_answers_as_far_as_prompts_differ():
    """One finished mate of 800 among prompts of 100: little where prompts are alike, most of it where they differ."""
    alike = [((tuple(50 + 25 * n for n in range(9)),), ())] * 20
    differ = [((tuple(20 * p + n for n in range(9)),), ()) for p in range(1, 21)]
    expected = [Shrunk().expected(view((800,), prompts=prompts), 0) for prompts in (alike, differ)]
    own = [Shrunk().expected(view((), prompts=prompts), 0) for prompts in (alike, differ)]
    assert own[0] <= expected[0] < 2 * own[0] and expected[1] > 1.5 * own[1]


def test_ours_learns_from_mates_that_run_on():
    """Eight mates beyond 300 tokens say more than one; a mate that has ended early says the contrary."""
    prompts = [((tuple(50 + 25 * n + p for n in range(9)),), ()) for p in range(0, 400, 20)]

    def expected(finished=(), running=()):
        return Shrunk().expected(view(finished, running, prompts=prompts), 0)

    assert expected(running=(0,) * 8) == expected()
    assert expected(finished=(30,) * 4) < expected() < expected(running=(300,)) < expected(running=(300,) * 8)


def test_ours_trusts_older_epochs_less():
    prompts = [((tuple(50 + 25 * n + p for n in range(9)),), ()) for p in range(0, 400, 20)]
    old, new = ((), (400, 410)), ((400, 410),)
    expected = [Shrunk().expected(view(history=history, prompts=prompts), 0) for history in ((), old, new)]
    assert expected == sorted(set(expected))


# ---- the classes of DAS ------------------------------------------------------------------------------


@settings(max_examples=80, derandomize=True, database=None)
@given(pools=st.lists(st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=15), min_size=1, max_size=6))
def test_promotions_are_where_the_shares_say(pools):
    """By definition: medium once P(short | longer) < 0.4, long once P(long | longer) > 0.6, and no sooner."""
    longest = max(map(max, pools))
    classes = length_classes(pools, longest, MAX_TOKENS)
    by_first = [[tokens for pool in pools if classes.first(pool) == first for tokens in pool] for first in range(3)]

    def shares(first, generated):
        longer = [classes.of(tokens) for tokens in by_first[first] if tokens > generated]
        return [longer.count(kind) / len(longer) if longer else None for kind in range(3)]

    medium_at, long_at = classes.starts[SHORT]
    for generated in range(0, int(classes.short_tokens) + 1, 7):
        short = shares(SHORT, generated)[SHORT]
        if by_first[SHORT] and short is not None and generated < classes.short_tokens:
            assert (generated >= medium_at) == (short < 0.4), generated
    assert medium_at <= classes.short_tokens + 1 and medium_at <= long_at <= classes.medium_tokens + 1
    early = classes.starts[1][1]
    for generated in range(0, int(classes.medium_tokens) + 1, 7):
        long = shares(1, generated)[LONG]
        if by_first[1] and long is not None and generated < classes.medium_tokens:
            assert (generated >= early) == (long > 0.6), generated
    assert classes.starts[2] == (0, 0) and classes.starts[1][0] == 0


def test_thresholds_follow_the_longest_answers_of_the_epochs():
    """T_short: the passes that the longest is meant to take, averaged over epochs; T_medium half-way to the bound."""
    prompts = [(((100, 400), (50,)), ()), (((10,), (600,)), (900,))]
    classes = batch_lengths(prompts, MAX_TOKENS).classes
    assert classes.short_tokens == PASS_SHARE * (400 + 600) / 2
    assert classes.medium_tokens == (classes.short_tokens + MAX_TOKENS) / 2
    assert batch_lengths([((), (300, 700))], MAX_TOKENS).classes.short_tokens == PASS_SHARE * 700


def test_the_first_class_is_that_of_most_answers_and_of_two_the_longer():
    classes = length_classes([[1000]], 1000, MAX_TOKENS)  # 400 and 700
    assert [classes.first(pool) for pool in ([1, 2, 900], [1, 500], [500, 900], [1, 500, 900])] == [0, 1, 2, 2]


def test_the_share_between_prompts_is_estimated():
    """One-way analysis of variance, groups of unequal size: means of 20 batches lie near the truth."""
    rng = np.random.default_rng(1)
    for truth in (0.1, 0.5, 0.8):
        found = []
        for _ in range(20):
            prompts = []
            for _ in range(60):
                mean = 5 + np.sqrt(truth) * rng.standard_normal()
                size = int(rng.integers(2, 20))
                logs = mean + np.sqrt(1 - truth) * rng.standard_normal(size)
                prompts.append(((), tuple(sorted((1 + np.exp(logs)).astype(int).tolist()))))
            found.append(batch_lengths(prompts, 1 << 20).between_share)
        assert np.mean(found) == pytest.approx(truth, abs=0.05)


# ---- in the core ------------------------------------------------------------------------------------


def starts(core) -> dict[str, StartChunk]:
    return {action.sample_id: action for action in tick(core) if isinstance(action, StartChunk)}


def core_of(replicas=1, **policies) -> RolloutCore:
    core = RolloutCore(Policies(chunking={"type": "fixed", "chunk_tokens": 40}, **policies))
    core.observe(join("r", 100, max_running=replicas))
    return core


def test_a_chunk_carries_what_is_expected_of_its_sample():
    core = core_of()
    submit(core, ev.GroupSpec("g", 10, 3, 90))
    probe = starts(core)["g#0"]
    assert probe.expected_tokens == 90
    core.observe(ev.ChunkFinished(0.0, probe.chunk_id, 25, ev.ChunkEnd.STOP, 0))
    second = starts(core)["g#1"]
    assert second.expected_tokens == 25
    core.observe(ev.ChunkFinished(0.0, second.chunk_id, 40, ev.ChunkEnd.LENGTH, 0))
    assert starts(core)["g#1"].expected_tokens == 41, "as long as its mate, and it is longer by now"


def test_history_reaches_policies_and_classes_reach_drafting():
    past = ((100,) * 8 + (120, 500, 510, 520, 900, 1000),)
    spec = ev.GroupSpec("g", 10, 1, MAX_TOKENS, past)
    core = core_of(lengths="history_quantile", drafting="length_class")
    submit(core, spec)
    start = starts(core)["g#0"]
    assert start.expected_tokens == 100 and start.class_starts == class_starts(view(history=past))
    core = core_of(lengths="history_quantile")
    submit(core, spec)
    assert starts(core)["g#0"].class_starts == (0, 0), "nobody reads it, so nobody works it out"


def test_running_mates_reach_policies_that_read_them():
    """`g#0` has made 40 tokens when `g#1` is queued again with 10: with nothing finished, that is all that is known."""
    core = core_of(lengths={"type": "test_lengths:MostMade"}, ordering="user_policies:FewestFirst")
    submit(core, ev.GroupSpec("g", 10, 2, 90))
    for sample_id, made, expected in (("g#0", 40, 1), ("g#1", 10, 1), ("g#1", 5, 40)):
        start = starts(core)[sample_id]
        assert start.expected_tokens == expected
        core.observe(ev.ChunkFinished(0.0, start.chunk_id, made, ev.ChunkEnd.ABORTED, 0))


class MostMade(Doubling):
    """As long as the longest running mate."""

    reads_all = True

    def expected(self, group, generated):
        return max([generated + 1, *group.running])


def test_a_batch_is_summed_up_as_its_evidence_doubles():
    """From nothing: after 1, 2, 4, 8, ... lengths, however many samples there are."""
    core = core_of(replicas=64, lengths="shrunk")
    core.observe(join("s", 4000, max_running=64))
    submit(core, *(ev.GroupSpec(f"g{n}", 10, 4, 40) for n in range(16)))
    answers = []
    for start in list(starts(core).values()):
        core.observe(ev.ChunkFinished(0.0, start.chunk_id, 30, ev.ChunkEnd.STOP, 0))
        if core._buffer.batches:
            (batch,) = core._buffer.batches.values()
            answers.append(batch.lengths.answers)
    changes = [after for before, after in pairwise([0, *answers]) if after != before]
    assert changes[0] == 1 and all(after >= 2 * before for before, after in pairwise(changes)) and len(changes) <= 7
