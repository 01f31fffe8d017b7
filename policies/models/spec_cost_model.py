"""Tokens per second of each sample if the drafter runs alongside the verifier (SpecActor 4.1).

Times are affine in the samples of a batch. Each draft token is right with probability p, independent of earlier ones. A
decoupled drafter that has sent a window of w tokens drafts w more during their verification. Tokens after a wrong one
are wasted, up to 2w - 1. In SpecActor's rounds a sample then sits out a verification until it has a new window, and a
right window brings w tokens (`renewal_tokens_s`). Tailrace's engines never wait: they continue with the drafts at hand
(`decoupled_tokens_s`). A coupled drafter waits too, so a right window brings one token of the verifier's own on top.
Pure functions; called by `specactor_planner`, `racing` and `aimd`.
"""

from typing import NamedTuple

RARE = 1e-4
"""Chance below which later steps are ignored."""

MOST_STEPS = 256
"""Maximum number of steps without a wrong token that are computed: later ones are all alike."""


class DrafterCost(NamedTuple):
    """Cost of a drafter on `gpus` GPUs: a draft token for each of b samples takes D(b) = b sample_s + base_s
    seconds.
    """

    gpus: int
    sample_s: float
    base_s: float

    def seconds(self, samples: float) -> float:
        return samples * self.sample_s + self.base_s


class VerifierCost(NamedTuple):
    """Cost of a verifier on `gpus` GPUs: w draft tokens of each of b samples and the token before them are verified in
    V_w(b) = b (sample_s + (w + 1) token_s) + base_s seconds. V_0 is plain decoding.
    """

    gpus: int
    sample_s: float
    token_s: float
    base_s: float

    def per_sample_s(self, window: int) -> float:
        return self.sample_s + (window + 1) * self.token_s

    def seconds(self, samples: float, window: int) -> float:
        return samples * self.per_sample_s(window) + self.base_s


def verified(p: float, window: int) -> float:
    """Returns the expected tokens of a verified window, without one on top: 1 + p + ... + p^(w-1)."""
    return float(window) if p >= 1.0 else (1 - p**window) / (1 - p)


def tau(p: float, window: int) -> float:
    """Returns tokens per round as SpecActor defines it: sum over a < w of p^a (1 - p) (a + 1) / 2, and w p^w.

    The a + 1 tokens are halved since a wrong token costs a second round. But rounds are then averaged over windows, as
    if each weighed the same regardless of its duration. The result is therefore too high (see `tau_exact`) unless p is
    0 or 1: by 10 % at p = 0.5, w = 4; 21 % at 0.7, 4; 24 % at 0.8, 6; 26 % at 0.9, 8. For 64 samples on 256 GPUs, p =
    0.5 and a drafter six times as fast as the verifier, its plan promises 5 % over plain decoding and loses 7 %.
    """
    return (verified(p, window) + window * p**window) / 2


def tau_exact(p: float, window: int) -> float:
    """Returns tokens per round by renewal: expected tokens of a window over its rounds, 1 if right and else 2.

    (1 + p + ... + p^(w-1)) / (2 - p^w).
    """
    return verified(p, window) / (2 - p**window)


def published_tokens_s(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> float:
    """Returns SpecActor's TGS: tau / max(w D(b), V_w(b)), each window verified with all b samples."""
    return tau(p, window) / max(window * drafter.seconds(samples), verifier.seconds(samples, window))


def renewal_tokens_s(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> float:
    """Returns TGS by renewal: tau_exact / max(w D(b), V_w(b / (2 - p^w))), as samples with a wrong draft sit out.

    At 128 samples and p = 0.5, w = 4 half of them do, and V is a quarter less. A single sample waits for no other: its
    windows start max(w D, V) apart after a right one and w D + V after a wrong one. Simulated token by token
    (tests/policies/test_planning.py) this holds within 2 % if the verifier is clearly the slower and 5 % if both are
    alike; the published form errs by -30 % to +25 %. If the drafter is the slower, samples get out of step and
    verifications run with few of them. Then this is up to 30 % too high: see `keeps_up`.
    """
    right = p**window
    draft_s = window * drafter.seconds(samples)
    if samples == 1:
        verify_s = verifier.seconds(1, window)
        return verified(p, window) / (right * max(draft_s, verify_s) + (1 - right) * (draft_s + verify_s))
    return tau_exact(p, window) / max(draft_s, verifier.seconds(samples / (2 - right), window))


def keeps_up(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> bool:
    """Returns whether in SpecActor's rounds a window is drafted while one is verified: w D(b) <= V_w(b / (2 - p^w))."""
    return window * drafter.seconds(samples) <= verifier.seconds(samples / (2 - p**window), window)


def decoupled_tokens_s(p: float, drafter: DrafterCost, verifier: VerifierCost, samples: int, window: int) -> float:
    """Returns tokens per second without waiting, as Tailrace's engines draft: tokens of a step over V at its mean
    drafts.
    """
    step_s = verifier.seconds(samples, 0)
    for _ in range(2):  # drafts of a step depend on its seconds, and those on the drafts verified
        tokens, drafts = step_means(p, window, step_s / drafter.seconds(samples))
        step_s = verifier.seconds(samples, drafts)
    return tokens / step_s


def step_means(p: float, window: int, drafted: float) -> tuple[float, float]:
    """Returns the mean tokens that a sample makes in a step without waiting, and the mean draft tokens verified for it.

    `drafted`: tokens that its drafter adds in a step. The mean runs from a wrong token to the next. The step after a
    wrong token has no draft and decodes plainly, while the drafter continues from the corrected context. Later steps
    verify n <= w tokens of the guess at hand and make 1 + p + ... + p^n. The guess continues with chance p^(n+1): its
    next token must equal the verifier's own on top. Then w - 1 tokens of a guess of 2w are left: full steps verify w
    and w - 1 in turn. A drafter reads messages between two of its steps, so it starts again half a token late.
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
    """Returns tokens per second with coupled drafts: (1 + p + ... + p^w) / (w D(b) + V_w(b)). A window of 0 is plain
    decoding.
    """
    return verified(p, window + 1) / (window * drafter.seconds(samples) + verifier.seconds(samples, window))
