"""Limits on the batches in flight, and the refusal of a batch beyond them: `quotas` in the Coordinator's `user_config`.

Invariant: a batch is admitted or refused at once; it never waits for a quota. Called by `Deliveries`.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RejectedBy
from tailrace.policies.protocol.file_keys import without_constants


class BatchLoad(NamedTuple):
    """Load of a batch in flight. `result_bytes`: bytes of its finished groups that its driver has not received."""

    samples: int
    tokens: int
    result_bytes: int = 0

    def __add__(self, other: "BatchLoad") -> "BatchLoad":
        """The sum of both, not the longer tuple."""
        return BatchLoad(*map(sum, zip(self, other, strict=True)))

    @classmethod
    def of(cls, groups: tuple[PromptGroup, ...], result_bytes: int = 0) -> "BatchLoad":
        """Returns the load of these groups. `tokens` is the sum of max_tokens over all samples."""
        samples = sum(group.samples for group in groups)
        return cls(samples, sum(group.samples * group.max_tokens for group in groups), result_bytes)


class Quotas(BaseModel):
    """Limits over all batches in flight, of all drivers."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=without_constants)
    file_keys: ClassVar[tuple[str, ...]] = ("max_samples", "max_tokens")
    max_samples: int | None = Field(None, ge=1, description="samples of all batches in flight; null: no limit")
    max_tokens: int | None = Field(None, ge=1, description="their max_tokens, over all samples; null: no limit")
    max_result_bytes: int = Field(
        8 << 30, ge=1, description="finished groups not taken by their drivers, at which no new batch begins"
    )

    def size_refusal(self, subject: str, load: BatchLoad) -> Rejected | None:
        """Returns Rejected if `subject`, with this load, can never run under these quotas, else None."""
        reason = _oversize("samples", subject, load.samples, self.max_samples) or _oversize(
            "tokens", subject, load.tokens, self.max_tokens
        )
        return Rejected(reason=reason, by=RejectedBy.SIZE) if reason else None

    def refusal(self, subject: str, load: BatchLoad, others: Mapping[str, BatchLoad]) -> Rejected | None:
        """Returns Rejected if `subject`, with this load, cannot run now, else None. `others`: loads in flight, by batch
        id in order of arrival.
        """
        if (never := self.size_refusal(subject, load)) is not None:
            return never
        reason = (
            _excess(
                "samples", subject, load.samples, {id_: one.samples for id_, one in others.items()}, self.max_samples
            )
            or _excess(
                "tokens", subject, load.tokens, {id_: one.tokens for id_, one in others.items()}, self.max_tokens
            )
            or self._unread(subject, {id_: one.result_bytes for id_, one in others.items()})
        )
        return Rejected(reason=reason, by=RejectedBy.QUOTA) if reason else None

    def _unread(self, subject: str, others: Mapping[str, int]) -> str | None:
        total = sum(others.values())
        if total < self.max_result_bytes:
            return None
        slowest = max(others, key=others.get)
        return (
            f"{subject}: {total} bytes of finished groups wait for their drivers, quotas.max_result_bytes is "
            f"{self.max_result_bytes}; try again when the driver of batch {slowest!r} has read its groups"
        )


def _oversize(kind: str, subject: str, wanted: int, bound: int | None) -> str | None:
    if bound is None or wanted <= bound:
        return None
    return f"{subject} has {wanted} {kind}, quotas.max_{kind} is {bound}; ask for fewer at once, or raise it"


def _excess(kind: str, subject: str, wanted: int, others: Mapping[str, int], bound: int | None) -> str | None:
    """Returns one line with the figures and the remedy, or None if the batch is within the limit."""
    if bound is None or wanted + sum(others.values()) <= bound:
        return None
    excess, ends = wanted + sum(others.values()) - bound, []
    for other, here in others.items():
        if excess > 0 and here:
            excess -= here
            ends.append(repr(other))
    batches = f"batch {ends[0]} has" if len(ends) == 1 else f"batches {', '.join(ends)} have"
    return (
        f"{subject} has {wanted} {kind}, those in flight have {sum(others.values())}, quotas.max_{kind} is "
        f"{bound}; try again when {batches} ended"
    )
