"""A sample of an open session that callers wait for: its answer, and its tokens as its chunks end.

Invariant: tokens that a caller has received never change, since a chunk is written once. Called by `OpenSessions`.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tailrace.deployments.batches.open_batch import GroupIdentity
from tailrace.deployments.batches.records import SampleRecord
from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.deployments.messages.rollout import BatchSettings, Rejected
from tailrace.deployments.messages.session import SampleAnswer, SampleTokens


@dataclass(eq=False, slots=True)
class AskedSample:
    """`sample_id`, `record`: set once the core and the records have taken the sample. `waiting`: number of its
    callers. `settings`: of the caller that wants the highest weights.
    """

    settings: BatchSettings
    identity: GroupIdentity
    index: int
    turn: int
    answer: asyncio.Future
    waiting: int = 0
    sample_id: str | None = None
    record: SampleRecord | None = None
    is_cancelled: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> tuple[GroupIdentity, int, int]:
        return self.identity, self.index, self.turn

    def take(self, sample_id: str, record: SampleRecord) -> None:
        """Records that the core has taken the sample."""
        self.sample_id, self.record = sample_id, record
        record.grown = self._notify
        self._notify()

    def join(self, settings: BatchSettings) -> None:
        """Records that one more caller wants the sample."""
        if settings.lowest_weights > self.settings.lowest_weights:
            self.settings = settings

    def give(self, answer: SampleAnswer | Rejected) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)
            self._notify()

    def _notify(self) -> None:
        """Wakes all callers that wait now; the others check before they wait."""
        self._changed.set()
        self._changed.clear()

    async def stream(self) -> AsyncIterator[SampleTokens | Rejected]:
        """Yields the prompt, then the tokens chunk by chunk, then the answer; or a refusal as the last item."""
        while self.record is None and not self.answer.done():
            await self._changed.wait()
        if self.record is not None:
            yield SampleTokens(prompt_token_ids=tuple(self.record.prompt.tolist()), start=0)
        given = start = 0
        while True:
            parts = self.record.parts if self.record is not None else ()
            if given < len(parts):
                yield _tokens(parts[given], start)
                start += len(parts[given].token_ids)
                given += 1
            elif self.answer.done():
                answer = self.answer.result()
                yield answer if isinstance(answer, Rejected) else SampleTokens(start=start, answer=answer)
                return
            else:
                await self._changed.wait()


def _tokens(part: ChunkResult, start: int) -> SampleTokens:
    return SampleTokens(
        start=start,
        token_ids=tuple(part.token_ids.tolist()),
        logprobs=tuple(part.logprobs.tolist()),
        raw_logprobs=tuple(part.raw_logprobs.tolist()),
        top_logprobs=part.top_logprobs,
        sampling_mask=part.sampling_mask,
    )
