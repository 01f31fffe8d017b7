"""The score of weights: logprobs of one short fixed sequence, by which replicas of one version are compared.

It is made from the model as it computes, so it shows what checksums of a source do not: a tensor that was changed in
place, or a packed copy of an earlier one. Made by engines and trainers, compared by engines and the coordinator.
"""

from math import fsum

Score = tuple[float, ...]
"""Natural logarithms under the model's own distribution, one for each of SCORED but the first; empty if not known."""

SCORED = tuple(range(100, 132))
"""Token ids of the sequence: every vocabulary of bytes has them, and their prefill takes one small step. Many
vocabularies begin with special tokens, after which the demo model's bfloat16 is off by 1.4 nats.
"""

TOLERANCE = 0.15
"""Maximum mean difference, in nats, of sound scores that are not equal to the bit: of a trainer, or at `law`. The demo
model differs by 0.06 between bfloat16 and float32, and by 0.5 with one of 30 attention outputs zeroed.
"""

BROKEN = -1e9
"""Logprob in the score of a model whose logits are no numbers."""


def apart(one: Score, other: Score) -> float:
    """Returns the mean absolute difference of two scores, in nats; infinity if their lengths differ."""
    if len(one) != len(other):
        return float("inf")
    return fsum(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True)) / max(1, len(one))
