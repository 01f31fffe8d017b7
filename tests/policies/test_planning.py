"""Decoupled plans: the rates against a simulation of the protocol token by token, and what a plan may never do."""

from itertools import product

import numpy as np
import pytest

from tailrace.deployments.drafter.lines import remaining
from tailrace.deployments.drafter.window import Window
from tailrace.policies.models.spec_cost_model import (
    DrafterCost,
    VerifierCost,
    coupled_tokens_s,
    decoupled_tokens_s,
    published_tokens_s,
    renewal_tokens_s,
    step_means,
    tau,
    tau_exact,
)
from tailrace.policies.models.specactor_planner import RATES, Decoupled, Plan
from tailrace.policies.protocol.actions import DraftMode

VERIFIER = VerifierCost(4, 1e-5, 2e-5, 0.013)
WIDE = VerifierCost(8, 5e-6, 1e-5, 0.010)
DRAFTER = DrafterCost(1, 2e-6, 2.2e-3)
SLOW = DrafterCost(2, 1e-4, 0.02)


def simulate(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int, tokens: int):
    """SpecActor's rounds: tokens a second of each sample, and the most draft tokens behind a wrong one that went to
    waste.

    The drafter adds a token at a time to all samples that may have one; the verifier takes all full windows that are
    ready, and never waits while there are any. A sample under verification may have one more window drafted.
    """
    rng = np.random.default_rng(1)
    drafted, right, wrong = (np.zeros(samples, kind) for kind in (int, int, bool))
    verifying, drafting = np.zeros(samples, bool), np.zeros(samples, bool)
    now = made = wasted = 0
    verified_at = drafted_at = np.inf
    while made < tokens:
        if verified_at == np.inf and (drafted >= window).any():
            verifying = drafted >= window
            verified_at = now + verifier.seconds(int(verifying.sum()), window)
        allowed = drafted < np.where(verifying, 2 * window, window)
        if drafted_at == np.inf and allowed.any():
            drafting, drafted_at = allowed, now + drafter.seconds(int(allowed.sum()))
        now = min(verified_at, drafted_at)
        if drafted_at <= now:
            luck = rng.random(samples) < p
            right += drafting & ~wrong & luck
            wrong |= drafting & ~luck
            drafted += drafting
            drafted_at = np.inf
        if verified_at <= now:
            accepted = np.minimum(right, window)
            failed = verifying & (accepted < window)
            made += int((accepted[verifying] + failed[verifying]).sum())
            wasted = max(wasted, int(np.max(drafted - accepted - 1, where=failed, initial=0)))
            passed = verifying & ~failed
            right[passed], drafted[passed] = right[passed] - window, drafted[passed] - window
            right[failed], drafted[failed], wrong[failed] = 0, 0, False
            drafting &= ~failed  # what is being drafted behind a wrong token is dropped
            verifying[:], verified_at = False, np.inf
    return made / samples / now, wasted


class Ahead:
    """An engine's sample and its drafter's window. Its tokens are all 0; a wrong draft is a 1."""

    def __init__(self, window: int):
        self.width, self.window = window, Window(0, 1 << 60, DraftMode(window, False))
        self.made, self.guess, self.news, self.drafts = 0, [], [], []

    def propose(self) -> list[int]:
        """What the engine makes of what the drafter has told by now: the draft of its next step."""
        for start, tokens in self.news:
            known = [0] * (self.made - start)
            self.guess = tokens[len(known) :] if tokens[: len(known)] == known else self.guess
        self.news, self.drafts = [], self.guess[: self.width]
        return self.drafts

    def verify(self) -> tuple[int, list[int]]:
        """A step of the engine: from where on it has made which tokens."""
        right = next((place for place, token in enumerate(self.drafts) if token), len(self.drafts))
        start, tokens = self.made, [0] * (right + 1)
        self.made, self.guess = start + len(tokens), remaining(self.guess, tokens)
        return start, tokens


def going_on(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int, tokens: int) -> float:
    """Tailrace's protocol: tokens a second of each sample, where both engines step for themselves and nobody waits.

    Either hears the other between two steps of its own; a drafter that has nothing to do begins as it hears.
    """
    rng, heard = np.random.default_rng(1), []
    all_ = [Ahead(window) for _ in range(samples)]
    now, drafting, drafted_at = 0.0, [], np.inf
    verified_at = verifier.seconds(samples, 0)
    while sum(one.made for one in all_) < tokens * samples:
        if not drafting:
            for one, news in heard:
                one.window.confirm(*news)
            heard, drafting = [], [one for one in all_ if one.window.room]
            drafted_at = now + drafter.seconds(len(drafting)) if drafting else np.inf
        now = min(drafted_at, verified_at)
        if drafted_at <= verified_at:
            for one in drafting:
                one.window.draft([int(rng.random() >= p)])
                one.news.append((one.window.confirmed, list(one.window.guess)))
            drafting = []
        else:
            heard += [(one, one.verify()) for one in all_]
            verified_at = now + verifier.seconds(samples, sum(len(one.propose()) for one in all_) / samples)
    return tokens / now


@pytest.mark.parametrize(("p", "window"), list(product((0.3, 0.5, 0.7, 0.9), (1, 2, 4, 6))))
def test_tokens_per_round_are_those_of_rounds_played_one_by_one(p, window):
    rng = np.random.default_rng(2)
    accepted = np.minimum(rng.geometric(1 - p, 40_000) - 1, window)
    rounds = np.where(accepted < window, 2, 1).sum()
    assert tau_exact(p, window) == pytest.approx(np.minimum(accepted + 1, window).sum() / rounds, rel=0.01)


@pytest.mark.parametrize(
    ("p", "window", "error"), [(0.0, 4, 0.0), (0.5, 4, 0.10), (0.7, 4, 0.21), (0.8, 6, 0.24), (0.9, 8, 0.26), (1, 4, 0)]
)
def test_the_papers_tokens_per_round_are_too_many_by_what_the_docstring_says(p, window, error):
    assert tau(p, window) / tau_exact(p, window) - 1 == pytest.approx(error, abs=0.005)
    by_definition = sum(p**a * (1 - p) * (a + 1) / 2 for a in range(window)) + window * p**window
    assert tau(p, window) == pytest.approx(by_definition)


@pytest.mark.parametrize(("samples", "p", "window"), [(1, 0.7, 4), (1, 0.9, 8), (128, 0.5, 4), (64, 0.7, 6)])
def test_rates_of_rounds_are_those_of_the_protocol_played_token_by_token(samples, p, window):
    played, wasted = simulate(p, DRAFTER, VERIFIER, samples, window, 40_000 if samples > 1 else 5_000)
    assert wasted <= 2 * window - 1
    assert renewal_tokens_s(p, DRAFTER, VERIFIER, samples, window) == pytest.approx(played, rel=0.04)
    if samples > 1:
        assert abs(published_tokens_s(p, DRAFTER, VERIFIER, samples, window) / played - 1) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter_s", [2e-4, 2e-3, 4e-3, 0.02, *(pytest.param(s, marks=pytest.mark.long) for s in (1e-3, 8e-3))]
)
@pytest.mark.parametrize(("samples", "p", "window"), [(1, 0.18, 4), (1, 0.8, 4), (16, 0.5, 2), (16, 0.9, 6)])
def test_rates_where_nobody_waits_are_those_of_the_engines_own_windows_played_token_by_token(
    samples, p, window, drafter_s
):
    """A drafter that is far ahead, that just keeps up, and that never does: a plain step takes 13 ms."""
    drafter = DrafterCost(1, 2e-6, drafter_s)
    played = going_on(p, drafter, VERIFIER, samples, window, 6_000 // samples)
    assert decoupled_tokens_s(p, drafter, VERIFIER, samples, window) == pytest.approx(played, rel=0.05)


def test_a_drafter_that_never_gets_ahead_costs_nothing_and_gains_nothing():
    assert decoupled_tokens_s(0.9, SLOW, VERIFIER, 16, 4) == pytest.approx(1 / VERIFIER.seconds(16, 0))


def test_where_all_is_right_full_steps_verify_a_window_and_one_token_less_in_turn():
    tokens, drafts = step_means(1.0, 4, 100.0)
    assert tokens == pytest.approx(4.5, rel=0.02) and drafts == pytest.approx(3.5, rel=0.02)


@pytest.mark.parametrize("rate", ["going_on", "renewal", "published"])
@pytest.mark.parametrize(("samples", "p"), list(product((64, 2_048, 16_384), (0.05, 0.4, 0.7, 0.95))))
def test_no_plan_of_its_kind_is_better_and_none_is_slower_than_plain_decoding(samples, p, rate):
    policy = Decoupled(rate=rate)
    plan = policy.plan(samples, 256, p, [DRAFTER, SLOW], [VERIFIER, WIDE])
    plain = max(1 / v.seconds(-(-v.gpus * samples // 256), 0) for v in (VERIFIER, WIDE))
    assert plan.tokens_s >= plain
    assert plan.drafter_gpus <= plan.verifier_gpus
    assert plan.samples * 256 >= (plan.drafter_gpus + plan.verifier_gpus) * samples
    if plan.drafter:
        given = p, plan.drafter, plan.verifier, plan.samples
        assert plan.tokens_s == RATES[rate](*given, plan.window)
        others = [RATES[rate](*given, w) for w in range(1, 33)]
        assert plan.tokens_s >= max(others) * (0.8 if rate == "renewal" else 1)  # there drafts have to keep up
    else:
        assert (plan.window, plan.tokens_s) == (0, plain)


def test_a_drafter_that_is_slow_or_wrong_is_left_out():
    assert Decoupled().plan(2_048, 256, 0.9, [SLOW], [VERIFIER]).drafter is None
    assert Decoupled().plan(2_048, 256, 0.0, [DRAFTER], [VERIFIER]).drafter is None
    assert Decoupled().plan(2_048, 256, 0.9, [], [VERIFIER]).drafter is None
    assert Decoupled().plan(2_048, 256, 0.9, [DRAFTER, SLOW], [VERIFIER]).drafter == DRAFTER
    for p, drafter in ((0.9, SLOW), (0.0, DRAFTER), (0.9, DRAFTER)):
        assert (Decoupled().best(32, p, drafter, VERIFIER).drafter == DRAFTER) == (p > 0 and drafter == DRAFTER)
    with pytest.raises(ValueError, match="no verifier fits"):
        Decoupled().plan(8, 2, 0.9, [DRAFTER], [VERIFIER])


def test_samples_below_the_mean_get_the_better_of_both_kinds_and_others_keep_the_plan():
    plan = Plan(DRAFTER, VERIFIER, 6, 1, 0.0, "given")
    acceptances = {"worst": 0.0, "bad": 0.35, "fair": 0.6, "good": 0.95, "best": 0.95}
    plans = Decoupled().reconfigure(acceptances, plan)
    assert set(plans) == {"bad", "worst"}
    assert (plans["worst"].window, plans["worst"].coupled) == (0, True)
    for sample_id, chosen in plans.items():
        p = acceptances[sample_id]
        for w in range(1, 33):
            assert chosen.tokens_s >= coupled_tokens_s(p, DRAFTER, VERIFIER, 1, w)
            assert chosen.tokens_s >= decoupled_tokens_s(p, DRAFTER, VERIFIER, 1, w)
    assert Decoupled().reconfigure({}, plan) == {}
    assert Decoupled().reconfigure(acceptances, Plan(None, VERIFIER, 0, 1, 0.0, "given")) == {}


def test_a_sample_that_accepts_little_waits_and_one_that_accepts_much_drafts_ahead():
    """A cheap verifier makes waiting expensive: decoupled pays where rejections are rare."""
    plan = Plan(DrafterCost(1, 0.0, 0.004), VerifierCost(4, 0.0, 0.0, 0.013), 3, 1, 0.0, "given")
    rounds = Decoupled(rate="renewal")
    chosen = rounds.reconfigure({"a": 0.2, "b": 0.9, "c": 0.99, "d": 0.999}, plan)
    assert chosen["a"].coupled
    few = rounds.reconfigure({"a": 0.9, "b": 0.99, "c": 0.99}, plan)
    assert not few["a"].coupled
