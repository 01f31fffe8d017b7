"""What speculation brings where the drafter runs beside the verifier: tokens a second of each sample (SpecActor 4.1).

Times are affine in the samples of a batch. Each draft token is right with probability p, whatever came before. A
decoupled drafter that has sent a window of w tokens drafts w more while they are verified; what follows a wrong one is
wasted, up to 2w - 1 tokens. In SpecActor's rounds a sample then sits out a verification until it has a new window, and
a window that is right brings w tokens (`renewal_tokens_s`). Tailrace's engines never wait: they continue with whatever
is there (`decoupled_tokens_s`). A coupled drafter waits too, so a window that is right brings one token of the
verifier's own on top. Pure functions; called by `planning`.
"""

from typing import NamedTuple

RARE = 1e-4
"""Chance below which what comes later does not count."""

MOST_STEPS = 256
"""Steps without a wrong token that are looked at: behind them all are alike."""


class DrafterCost(NamedTuple):
    """On `gpus` GPUs, a draft token for each of b samples takes D(b) = b sample_s + base_s seconds."""

    gpus: int
    sample_s: float
    base_s: float

    def seconds(self, samples: float) -> float:
        return samples * self.sample_s + self.base_s


class VerifierCost(NamedTuple):
    """On `gpus` GPUs, w draft tokens of each of b samples and the token before them are verified in
    V_w(b) = b (sample_s + (w + 1) token_s) + base_s seconds. V_0 is plain decoding."""

    gpus: int
    sample_s: float
    token_s: float
    base_s: float

    def per_sample_s(self, window: int) -> float:
        return self.sample_s + (window + 1) * self.token_s

    def seconds(self, samples: float, window: int) -> float:
        return samples * self.per_sample_s(window) + self.base_s


def verified(p: float, window: int) -> float:
    """Expected tokens of a verified window, without one on top: 1 + p + ... + p^(w-1)."""
    return float(window) if p >= 1.0 else (1 - p**window) / (1 - p)


def tau(p: float, window: int) -> float:
    """Tokens per round as SpecActor has it: sum over a < w of p^a (1 - p) (a + 1) / 2, and w p^w.

    The a + 1 tokens are halved since a wrong token costs a second round. But rounds are then averaged over windows, as
    if each window weighed the same however long it takes, so the result is too high (see `tau_exact`) unless p is 0 or
    1: by 10 % at p = 0.5, w = 4; 21 % at 0.7, 4; 24 % at 0.8, 6; 26 % at 0.9, 8. For 64 samples on 256 GPUs, p = 0.5
    and a drafter six times as fast as the verifier, a plan by it promises 5 % over plain decoding and loses 7 %.
    """
    return (verified(p, window) + window * p**window) / 2


def tau_exact(p: float, window: int) -> float:
    """Tokens per round by renewal: what a window brings over the rounds it takes, 1 if right and else 2.

    (1 + p + ... + p^(w-1)) / (2 - p^w).
    """
    return verified(p, window) / (2 - p**window)


def published_tokens_s(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> float:
    """SpecActor's TGS: tau / max(w D(b), V_w(b)), each window verified with all b samples."""
    return tau(p, window) / max(window * drafter.seconds(samples), verifier.seconds(samples, window))


def renewal_tokens_s(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> float:
    """The same by renewal: tau_exact / max(w D(b), V_w(b / (2 - p^w))), as samples whose draft was wrong sit out.

    At 128 samples and p = 0.5, w = 4 half of them do, and V is a quarter less. For a single sample, which waits for
    nobody, windows start w D or V apart, whichever is longer, after a right one and w D + V after a wrong one.
    Simulated token by token (tests/test_planning.py) this holds within 2 % where the verifier is clearly the slower
    and 5 % where both are alike, and the published form errs by -30 % to +25 %. Where the drafter is the slower,
    samples get out of step, verifications run with few of them, and this is up to 30 % too high: see `keeps_up`.
    """
    right = p**window
    draft_s = window * drafter.seconds(samples)
    if samples == 1:
        verify_s = verifier.seconds(1, window)
        return verified(p, window) / (right * max(draft_s, verify_s) + (1 - right) * (draft_s + verify_s))
    return tau_exact(p, window) / max(draft_s, verifier.seconds(samples / (2 - right), window))


def keeps_up(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> bool:
    """Whether in SpecActor's rounds a window is drafted while one is verified: w D(b) <= V_w(b / (2 - p^w))."""
    return window * drafter.seconds(samples) <= verifier.seconds(samples / (2 - p**window), window)


def decoupled_tokens_s(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> float:
    """Where nobody waits, as Tailrace's engines draft: tokens of a step over V at the mean of what it verifies."""
    step_s = verifier.seconds(samples, 0)
    for _ in range(2):  # what is drafted in a step depends on how long it takes to verify what was
        tokens, drafts = step_means(p, window, step_s / drafter.seconds(samples))
        step_s = verifier.seconds(samples, drafts)
    return tokens / step_s


def step_means(p: float, window: int, drafted: float) -> tuple[float, float]:
    """Tokens that a sample makes in a step where nobody waits, and draft tokens of it that are verified, on average.

    `drafted`: tokens that its drafter adds in a step. From a wrong token to the next: the step after it has no draft
    and decodes plainly, while the drafter continues from the corrected context. Later steps verify n <= w tokens of the
    guess at hand and make 1 + p + ... + p^n; all of it continues, with chance p^(n+1), if the next token of the guess
    is the verifier's own on top too. Of a guess that then stood at 2w, w - 1 are left: full steps verify w and w - 1 in
    turn. A drafter hears between two steps of its own, hence starts again half a token late.
    """
    tokens = drafts = steps = 0.0
    guess, going = -0.5, 1.0  # draft tokens at hand, and the chance that nothing has been wrong yet
    for _ in range(MOST_STEPS):
        width = min(window, int(guess))
        tokens, drafts, steps = tokens + going * verified(p, width + 1), drafts + going * width, steps + going
        going *= p ** (width + 1)
        guess = max(-0.5, min(2 * window, guess + drafted) - width - 1)
        if going < RARE:
            break
    return tokens / steps, drafts / steps


def coupled_tokens_s(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> float:
    """Where drafts wait for verification: (1 + p + ... + p^w) / (w D(b) + V_w(b)). A window of 0 is plain decoding."""
    return verified(p, window + 1) / (window * drafter.seconds(samples) + verifier.seconds(samples, window))
