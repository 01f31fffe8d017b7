"""Drafting policies: the contract that every one keeps, the user's own included, and what each one means."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from user_policies import HalfADraft

from tailrace.policies.families.aimd import Aimd
from tailrace.policies.families.closed_form import ClosedForm, PositionCounts, best_passes, budgets, fit
from tailrace.policies.families.drafting import Concurrency, Drafting, FixedBudget, LengthClassBudget
from tailrace.policies.families.goodput import Goodput
from tailrace.policies.families.registry import members
from tailrace.policies.protocol.step_cost import StepCost
from tailrace.policies.protocol.views import DraftView

EVERY = [*(cls() for cls in members("drafting").values()), HalfADraft(), Goodput(margin=0.0, tail_weight=3.0)]
CPU = StepCost((1.0, 12.0, 512.0), (0.016, 0.018, 0.544))
GPU = StepCost((1.0, 64.0, 512.0), (0.010, 0.0105, 0.014))
FREE = StepCost((1.0, 2.0), (0.01, 0.01))


def view(right, cost=GPU, acceptance=0.5, **columns) -> DraftView:
    """A view of proposals with these chances; other columns as given, or as of samples that have just begun."""
    right = [list(row) for row in right]
    width = max([1, *map(len, right)])
    count = len(right)

    def column(name, default, kind=np.int32):
        return np.array(columns.pop(name, [default] * count), kind)

    seen = DraftView(
        right=np.array([row + [0.0] * (width - len(row)) for row in right], np.float32).reshape(count, width),
        proposed=np.array([len(row) for row in right], np.int32),
        match_tokens=column("match_tokens", 9),
        slot=np.array(columns.pop("slot", range(count)), np.int64),
        verifications=column("verifications", 0, np.int64),
        drafted_last=column("drafted_last", 0),
        accepted_last=column("accepted_last", 0),
        generated=column("generated", 10),
        expected=column("expected", 500),
        medium_at=column("medium_at", 0),
        long_at=column("long_at", 0),
        acceptance=acceptance,
        cost=cost,
    )
    assert not columns, "or a test speaks of a column that is not there"
    return seen


@st.composite
def views(draw, most_samples=5, most_tokens=6):
    chance = st.floats(0.0, 1.0, width=32)
    right = draw(st.lists(st.lists(chance, max_size=most_tokens), max_size=most_samples))
    count = len(right)

    def column(low, high):
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    drafted = column(0, 6)
    generated = column(0, 300)
    return view(
        right, draw(st.sampled_from((CPU, GPU, FREE))), draw(st.floats(0.0, 1.0)), match_tokens=column(0, 9),
        slot=draw(st.permutations(range(count))), verifications=column(0, 3), drafted_last=drafted,
        accepted_last=[draw(st.integers(0, tokens)) for tokens in drafted], generated=generated,
        expected=[tokens + draw(st.integers(0, 400)) for tokens in generated], medium_at=column(0, 300),
        long_at=column(0, 500),
    )  # fmt: skip


def copied(value):
    """A deep copy of a view or memory, to see whether it is written to."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple):
        parts = [copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def tokens_of(policy, seen: DraftView, memory=None) -> list[int]:
    return policy.decide(seen, memory)[0].tolist()


# ---- the contract ----------------------------------------------------------------------------------


@settings(max_examples=30, derandomize=True, database=None)
@given(steps=st.lists(views(), min_size=1, max_size=3))
def test_every_member_keeps_the_contract(steps):
    """By the same steps: to draw them takes longer than to ask all members."""
    for policy in EVERY:
        _keeps_the_contract(policy, steps)


def _keeps_the_contract(policy, steps):
    """Budgets within 0 to min(proposed, most); the same for the same; neither view nor memory is written to."""
    assert isinstance(policy, Drafting)
    memory = None
    for seen in steps:
        before = copied(seen), copied(memory)
        tokens, after = policy.decide(seen, memory)
        assert tokens.dtype == np.int32 and tokens.shape == seen.proposed.shape
        assert (tokens >= 0).all() and (tokens <= np.minimum(seen.proposed, policy.max_draft_tokens)).all()
        again, after_again = policy.decide(seen, memory)
        assert same(tokens, again) and same(after, after_again)
        assert same(before, (seen, memory))
        memory = after


@pytest.mark.parametrize("policy", EVERY, ids=lambda p: type(p).__name__)
def test_nothing_proposed_nothing_drafted(policy):
    assert tokens_of(policy, view([])) == []
    assert tokens_of(policy, view([[], []])) == [0, 0]


# ---- what each one means ----------------------------------------------------------------------------


def test_off_and_fixed():
    seen = view([[0.9] * 9, [0.9] * 2])
    assert tokens_of(members("drafting")["off"](), seen) == [0, 0]
    assert tokens_of(FixedBudget(tokens=4), seen) == [4, 2]


def test_aimd_grows_by_two_while_all_is_right_and_falls_back_to_two():
    """RhymeRL 5.4, for one sample whose proposals are always long enough."""
    policy, memory, windows = Aimd(max_draft_tokens=8), None, []
    for drafted, accepted in ((0, 0), (2, 2), (4, 4), (6, 6), (8, 8), (8, 7), (2, 2), (0, 0)):
        verifications = [len(windows)]
        seen = view([[0.9] * 32], drafted_last=[drafted], accepted_last=[accepted], verifications=verifications)
        tokens, memory = policy.decide(seen, memory)
        windows += tokens.tolist()
    assert windows == [2, 4, 6, 8, 8, 2, 4, 4]


def test_aimd_starts_anew_where_a_slot_has_changed_hands():
    policy = Aimd()
    _, memory = policy.decide(view([[0.9] * 9] * 2, slot=[3, 1]), None)
    grown = {"drafted_last": [2, 2], "accepted_last": [2, 2], "slot": [3, 1]}
    assert tokens_of(policy, view([[0.9] * 9] * 2, verifications=[1, 0], **grown), memory) == [4, 2]


def test_aimd_drafts_only_from_contexts_of_three_tokens():
    assert tokens_of(Aimd(), view([[0.9] * 9] * 3, match_tokens=[2, 3, 7])) == [0, 2, 2]


def test_aimd_is_off_above_a_batch_size_that_depends_on_acceptance():
    """On the CPU a window of 2 pays for one sample and not for a full batch; for how many, acceptance decides."""

    def greatest(acceptance):
        return max(n for n in range(65) if n == 0 or sum(tokens_of(Aimd(), view([[0.9] * 9] * n, CPU, acceptance))))

    assert 0 == greatest(0.0) < greatest(0.3) < greatest(0.8) < 64


def test_length_class_gives_short_none_and_long_twice_as_many():
    classes = {"generated": [99, 100, 299, 300], "medium_at": [100] * 4, "long_at": [300] * 4}
    policy = LengthClassBudget(medium_tokens=3)
    assert tokens_of(policy, view([[0.5] * 9] * 4, **classes)) == [0, 3, 3, 6]
    assert policy.reads_classes and policy.max_draft_tokens == 6


def test_concurrency_shares_the_batch_s_tokens_and_stops_at_the_first_doubtful_one():
    policy = Concurrency(max_draft_tokens=6, batch_tokens=8, min_probability=0.5)
    sure, doubtful = [0.9] * 9, [0.9, 0.4, 0.9]
    assert tokens_of(policy, view([sure])) == [6]
    assert tokens_of(policy, view([sure, doubtful])) == [4, 1]
    assert tokens_of(policy, view([sure] * 9)) == [0] * 9


def rate(seen: DraftView, tokens, weights) -> float:
    """Expected weighted tokens of a step over its time."""
    gains = [1 + np.cumprod(row[:n], dtype=np.float64).sum() for row, n in zip(seen.right, tokens, strict=True)]
    return float(np.dot(weights, gains) / seen.cost.at(sum(tokens) + len(tokens)))


@settings(max_examples=100, derandomize=True, database=None)
@given(seen=views(3, 3), tail_weight=st.sampled_from((0.0, 1.0, 2.5)), margin=st.sampled_from((0.0, 0.05)))
def test_goodput_is_the_best_of_all_budgets(seen, tail_weight, margin):
    """Brute force: no choice of budgets makes more expected tokens a second; without a gain, none is drafted."""
    policy = Goodput(tail_weight=tail_weight, margin=margin)
    tokens = tokens_of(policy, seen)
    left = seen.expected - seen.generated
    left = np.where(left <= 1, left.max(initial=1), left)
    weights = (left / left.max(initial=1)) ** tail_weight
    choices = product(*(range(proposed + 1) for proposed in seen.proposed))
    if not len(tokens):
        return
    none = rate(seen, [0] * len(tokens), weights)
    best = max(rate(seen, choice, weights) for choice in choices)
    if sum(tokens):
        assert rate(seen, tokens, weights) == pytest.approx(best)
    assert rate(seen, tokens, weights) >= none
    if best > none * (1 + margin) * (1 + 1e-9):
        assert sum(tokens)


def test_goodput_drafts_less_the_more_samples_run():
    """Acceptance and costs alike, the room for drafts goes from all to none; in the tail all is worth it."""
    drafts = [tokens_of(Goodput(), view([[0.8] * 16] * n, CPU)) for n in (1, 4, 12, 40)]
    shares = [sum(tokens) / len(tokens) for tokens in drafts]
    assert shares == sorted(shares, reverse=True) and shares[0] >= 8 and shares[-1] == 0


def test_goodput_corrects_chances_that_do_not_come_true():
    """Claims of 0.9 of which none comes true: drafts end, are tried again, and go on once they are right."""
    policy, memory, seen = Goodput(), None, view([[0.9] * 8] * 6, CPU)
    drafted = [sum(tokens_of(policy, seen))]
    tokens = np.zeros(6, np.int32)
    for turn in range(600):
        accepted = np.zeros(6, np.int32) if turn < 300 else tokens
        verifications = np.full(6, turn)
        last = seen._replace(drafted_last=tokens, accepted_last=accepted, verifications=verifications)
        tokens, memory = policy.decide(last, memory)
        drafted.append(int(tokens.sum()))
    assert drafted[0] >= 6 and drafted[30] == 0 and 0 < np.mean(drafted[30:300]) < drafted[0] / 4
    assert drafted[-1] >= drafted[0]


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("truth", [0.0, 0.2, 0.5, 0.8])
def test_goodput_loses_little_to_no_drafts_and_to_the_best_fixed_budget_however_wrong_the_claims(samples, truth):
    """By the CPU's costs; every token is claimed with 0.9, and right with `truth`. Chance is less over many samples."""
    turns = 1500 if samples == 1 else 500
    rng, memory, tokens = np.random.default_rng(0), None, np.zeros(samples, np.int32)
    seen, spent_s, made = view([[0.9] * 8] * samples, CPU), 0.0, 0
    for turn in range(turns):
        lucky = np.cumprod(rng.random((samples, 8)) < truth, axis=1).sum(axis=1)
        accepted = np.minimum(lucky, tokens)
        spent_s += float(CPU.at(samples + tokens.sum()))
        made += samples + accepted.sum()
        last = {"drafted_last": tokens, "accepted_last": accepted, "verifications": np.full(samples, turn)}
        tokens, memory = Goodput().decide(seen._replace(**last), memory)
    fixed = [
        samples * sum(truth**place for place in range(budget + 1)) / CPU.at(samples * (1 + budget))
        for budget in range(9)
    ]
    assert made / spent_s >= 0.98 * fixed[0] and made / spent_s >= 0.97 * max(fixed)


def test_goodput_learns_nothing_from_drafts_that_it_did_not_see_proposed():
    """Another policy's, before it was chosen: they were right, and their chances are not known."""
    seen = view([[0.05] * 8] * 3, CPU, drafted_last=[8] * 3, accepted_last=[8] * 3, verifications=[9] * 3)
    assert (Goodput().decide(seen, None)[1].factors() == 1).all()


def test_goodput_drafts_more_of_what_is_right_more_often_than_claimed():
    seen, memory, tokens = view([[0.45] * 8] * 3, CPU), None, np.ones(3, np.int32)
    first = sum(tokens_of(Goodput(), seen))
    for turn in range(200):
        last = seen._replace(drafted_last=tokens, accepted_last=tokens, verifications=np.full(3, turn))
        tokens, memory = Goodput().decide(last, memory)
        tokens = np.maximum(tokens, 1)
    assert tokens.sum() > first


@given(running=st.integers(1, 100), chance=st.floats(0.0, 1.0), tokens=st.integers(1, 60))
def test_tokens_below_the_least_chance_never_pay(running, chance, tokens):
    cost = StepCost((4, 8, 16, 32, 64, 128), (0.041, 0.050, 0.072, 0.112, 0.203, 0.395))
    if chance < cost.least_chance(running):
        assert (running + tokens * chance) / cost.at(running + tokens) <= running / cost.at(running)


def test_a_sample_that_has_outlived_its_expectation_is_no_short_one():
    lengths = {"generated": [900, 100], "expected": [800, 1100]}
    outlived, other = tokens_of(Goodput(), view([[0.7] * 8] * 2, CPU, **lengths))
    assert outlived == other > 0


def test_goodput_favours_the_longest_in_the_tail_only():
    right = [[0.7] * 8] * 3
    lengths = {"generated": [100, 100, 100], "expected": [110, 150, 1100]}
    late = tokens_of(Goodput(), view(right, CPU, **lengths))
    assert late[0] <= late[1] < late[2]
    assert tokens_of(Goodput(tail_running=2), view(right, FREE, **lengths)) == [8, 8, 8]


# ---- the closed form of DAS -------------------------------------------------------------------------


def time_left(left, alpha, k, base_s, token_s, passes) -> float:
    """Equation 6 at the budgets of equation 7."""
    return base_s * passes + token_s * budgets(left, alpha, k, passes).sum()


@settings(max_examples=80, derandomize=True, database=None)
@given(
    left=st.lists(st.floats(1.0, 5000.0), min_size=1, max_size=12),
    alpha=st.floats(0.2, 5.0), k=st.floats(0.1, 0.9), token_s=st.sampled_from((1e-6, 1e-4, 1e-3, 1e-2)),
)  # fmt: skip
def test_the_passes_are_where_the_time_left_is_least(left, alpha, k, token_s):
    """Against a scan of N, and its derivative changes sign there."""
    left = np.array(left)
    passes = best_passes(left, alpha, k, 0.01, token_s)
    low, high = left.max() * (1 - k), left.max()
    assert low < passes <= high * (1 + 1e-12)
    found = time_left(left, alpha, k, 0.01, token_s, passes)
    scanned = min(time_left(left, alpha, k, 0.01, token_s, n) for n in np.linspace(low, high, 400)[1:])
    assert found <= scanned * (1 + 1e-3)


def test_with_its_budgets_every_sample_is_through_after_the_passes():
    """Equations 3 and 4: what is not accepted takes a pass each; short samples need no draft."""
    left, alpha, k, passes = np.array([1000.0, 800.0, 450.0]), 1.3, 0.7, 500.0
    drafts = budgets(left, alpha, k, passes)
    accepted = k * left * (1 - np.exp(-alpha * drafts / left))
    assert (left - accepted)[:2] == pytest.approx(passes) and drafts[2] == 0 < drafts[1] < drafts[0]


def test_alpha_and_k_are_found_again_in_what_was_accepted():
    """Verifications made by equation 3 itself; k bounds what can be accepted, alpha how fast it is reached."""
    alpha, k = 1.7782794100389228, 0.6
    accepted = np.zeros(17)
    for drafts in range(1, 17):  # y (1 + a) = a, x (1 + a) = drafts: solved for a by bisection
        low, high = 0.0, 16.0
        for _ in range(60):
            a = (low + high) / 2
            low, high = (a, high) if k * (1 - np.exp(-alpha * drafts / (1 + a))) > a / (1 + a) else (low, a)
        accepted[drafts] = a
    tries = np.full(17, 500.0)
    assert fit(PositionCounts(tries, accepted * tries)) == pytest.approx((alpha, k), rel=0.1)
    assert fit(PositionCounts(np.zeros(17), np.zeros(17))) == pytest.approx((1.0, 0.7), rel=0.01)


def test_the_closed_form_gives_up_where_nothing_is_accepted_and_the_longest_most():
    policy = ClosedForm()
    lengths = {"generated": [0] * 3, "expected": [1000, 700, 100]}
    fresh = view([[0.9] * 16] * 3, **lengths)

    def run(accepted):
        memory, total = None, np.zeros(3)
        tokens = np.zeros(3, np.int32)
        for turn in range(300):
            last = {"drafted_last": tokens, "accepted_last": np.minimum(tokens, accepted), "verifications": [turn] * 3}
            tokens, memory = policy.decide(fresh._replace(**{k: np.array(v) for k, v in last.items()}), memory)
            total += tokens * (turn >= 200)
        return total / 100

    kind, vain = run(3), run(0)
    assert kind[0] > kind[1] > kind[2] == 0
    assert vain.sum() < kind.sum() / 2


# ---- costs ------------------------------------------------------------------------------------------


def test_a_step_s_cost_is_linear_between_its_points_and_behind_them_and_never_below_the_first():
    cost = StepCost((2.0, 10.0, 20.0), (1.0, 3.0, 4.0))
    assert cost.at([1, 2, 6, 10, 15, 20, 40]).tolist() == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 6.0]
    assert cost == StepCost((2.0, 10.0, 20.0), (1.0, 3.0, 4.0)) and hash(cost)


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        ((1.0,), (1.0,)), ((1.0, 2.0), (1.0,)), ((0.0, 1.0), (1.0, 2.0)), ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)), ((1.0, 2.0), (0.0, 1.0)),
        ((1.0, 2.0), (1.0, float("nan"))), ((1.0, float("inf")), (1.0, 2.0)),
    ],
)  # fmt: skip
def test_costs_that_cannot_be_are_refused(tokens, seconds):
    with pytest.raises(ValueError, match="step's cost"):
        StepCost(tokens, seconds)
