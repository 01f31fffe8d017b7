"""All that is known of one sample or one batch, by its name: chunks, moves, reasons, faults.

A name is the id in the core (`BATCH~NONCE/PROMPT#INDEX`), or the driver's own (`BATCH/PROMPT#INDEX`, `BATCH`). Called
by the coordinator at a person's request.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from tailrace.deployments.batches.live_batches import LiveBatches
from tailrace.deployments.batches.records import escaped
from tailrace.deployments.feed.survey import tokens_of, why_of
from tailrace.deployments.feed.trails import Trail, TrailChunk, TrailFault, Trails
from tailrace.deployments.messages.status import BatchLog, ChunkLog, FaultLog, SampleDetail, SampleLog
from tailrace.policies.core.request_buffer import Sample
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.sample_states import ENDED

SHOWN_SAMPLES = 50
"""Maximum number of samples shown for a batch."""


class Logs:
    """`now`: the coordinator's clock, in seconds. `unix_s`: unix seconds at its 0. `peek`: returns the tokens of a
    running chunk, by its replica and id, or None.
    """

    def __init__(
        self,
        batches: LiveBatches,
        trails: Trails,
        core: Callable[[], RolloutCore],
        now: Callable[[], float],
        unix_s: float,
        peek: Callable[[str, str], Awaitable[np.ndarray | None]],
    ):
        self._batches, self._trails, self._core, self._now, self._unix_0_s = batches, trails, core, now, unix_s
        self._peek = peek

    def faults(self) -> tuple[FaultLog, ...]:
        """Returns the newest faults, oldest first."""
        return tuple(map(self._fault, self._trails.faults))

    async def detail(self, sample_id: str) -> SampleDetail | None:
        """Returns an unended sample's state, with the tokens of its running chunk if the replica sends them in time."""
        chunk = self._trails.running(sample_id)
        more = None if chunk is None else await self._peek(chunk.replica_id, chunk.chunk_id)
        is_last = chunk is not None and self._trails.running(sample_id) is chunk
        return self._batches.detail(sample_id, more if is_last else None)

    def sample(self, name: str) -> SampleLog | None:
        """Returns a sample's log, or None if there is no sample of that name, or if too many have ended since it
        did. Several samples may have one name: that of the newest batch counts.
        """
        for sample_id in self._sample_ids(name):
            sample, trail = self._core().sample(sample_id), self._trails.get(sample_id)
            if sample is not None or trail is not None:
                return self._sample_log(sample_id, sample, trail or Trail())
        return None

    def batch(self, name: str) -> BatchLog | None:
        """Returns a batch's log, or None if no sample of such a batch is known. Several batches may have one name: the
        newest counts.
        """
        core_ids = self._core_ids(name)
        return self._batch_log(core_ids[0]) if core_ids else None

    def _core_ids(self, name: str) -> list[str]:
        """Returns the ids in the core of the batches with this name, newest first, those in flight before others."""
        live = [batch.core_id for batch in self._batches.all()]
        known = dict.fromkeys((*reversed(live), *self._trails.ended_batches()))
        wanted = escaped(name, "/")
        return [one for one in known if name == one or one.rpartition("~")[0] == wanted]

    def _sample_ids(self, name: str) -> Iterator[str]:
        """Yields the ids in the core that a sample with this name may have, those of the newest batches first. Any
        slash of the name may be the one after its batch.
        """
        yield name
        for place in (place for place, mark in enumerate(name) if mark == "/"):
            prompt_id, _, index = name[place + 1 :].rpartition("#")
            for core_id in self._core_ids(name[:place]):
                yield f"{core_id}/{escaped(prompt_id, '#')}#{index}"

    def _batch_log(self, core_id: str) -> BatchLog:
        trails = dict(self._trails.of_batch(core_id))
        live = next((batch for batch in self._batches.all() if batch.core_id == core_id), None)
        known = {} if live is None else {name: self._core().sample(name) for name in live.samples}
        counts = Counter(trail.end for trail in trails.values() if trail.end)
        counts.update(
            sample.state.value for sample in known.values() if sample is not None and sample.state is not ENDED
        )
        order = sorted(trails, key=lambda name: (not _failed(trails[name]), -len(trails[name].chunks), name))
        return BatchLog(
            batch_id=core_id,
            status=None if live is None else live.status(self._now(), self._unix_0_s, _tokens(known.values())),
            counts=dict(counts),
            chunks=sum(len(trail.chunks) + trail.dropped for trail in trails.values()),
            moves=sum(trail.moves for trail in trails.values()),
            faults=tuple(self._fault(one) for one in self._trails.faults if one.sample_id in trails),
            samples=tuple(
                self._sample_log(name, known.get(name), trails[name]) for name in islice(order, SHOWN_SAMPLES)
            ),
        )

    def _sample_log(self, sample_id: str, sample: Sample | None, trail: Trail) -> SampleLog:
        unended = sample is not None and sample.state is not ENDED
        counted = [one for one in trail.chunks if one.counts]
        return SampleLog(
            sample_id=sample_id,
            state=sample.state.value if sample is not None else ENDED.value,
            end=trail.end,
            why=why_of(self._core(), sample, trail) if unended else trail.reason,
            error=trail.error,
            tokens=tokens_of(sample) if sample else max((one.start + one.new_tokens for one in counted), default=0),
            expected_tokens=sample.expected_tokens if unended else None,
            max_tokens=sample.max_tokens if unended else None,
            moves=trail.moves,
            dropped=trail.dropped,
            chunks=tuple(map(self._chunk, trail.chunks)),
        )

    def _chunk(self, chunk: TrailChunk) -> ChunkLog:
        return ChunkLog(
            chunk_id=chunk.chunk_id,
            replica_id=chunk.replica_id,
            began_s=self._unix_s(chunk.began_s),
            ended_s=None if chunk.ended_s is None else self._unix_s(chunk.ended_s),
            start=chunk.start,
            new_tokens=chunk.new_tokens,
            reason=chunk.reason,
            end=chunk.end,
            asked=chunk.asked,
            error=chunk.error,
            copy_of=chunk.copy_of,
            method=chunk.method,
        )

    def _fault(self, fault: TrailFault) -> FaultLog:
        return FaultLog(
            number=fault.number,
            at_s=self._unix_s(fault.at_s),
            sample_id=fault.sample_id,
            replica_id=fault.replica_id,
            text=fault.text,
        )

    def _unix_s(self, at_s: float) -> float:
        return round(self._unix_0_s + at_s, 3)


def _tokens(samples: Iterable[Sample | None]) -> int:
    return sum(tokens_of(sample) for sample in samples if sample is not None)


def _failed(trail: Trail) -> bool:
    return any(chunk.error for chunk in trail.chunks)
