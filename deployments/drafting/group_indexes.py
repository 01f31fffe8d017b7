"""The draft indexes of the groups that an engine runs or ran recently: tokens of mates and of earlier epochs.

Invariant: an index that a running chunk uses is never dropped, and what a chunk costs does not grow with the others.
When all indexes together, with their histories, exceed `index_mib`, the others are dropped, those unused for the
longest time first.
Histories are indexed on a separate thread and attached when they are ready.
Owned by `EngineDrafts`, on the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from tailrace.deployments.draft_index.group_index import GroupIndex, HistoryIndex
from tailrace.deployments.draft_index.scorer import CandidateScorer
from tailrace.deployments.messages.context import GroupRef, PastAnswer
from tailrace.deployments.vllm_exact.engine_config import DraftConfig

if TYPE_CHECKING:  # it imports Ray, which nothing else here needs
    from tailrace.deployments.context.context_client import ContextClient


class IndexedGroup:
    """A group on this engine; `running` counts its chunks. `sizes`: tokens and bytes of its index, as counted last."""

    __slots__ = ("epoch", "index", "prompt", "ref", "running", "sizes")

    def __init__(self, ref: GroupRef, epoch: int, prompt: np.ndarray, index: GroupIndex):
        self.ref, self.epoch, self.prompt, self.index = ref, epoch, prompt, index
        self.running, self.sizes = 0, (0, 0)


class GroupIndexes:
    """The indexes by group.

    `feed`: supplies tokens of other replicas and of earlier epochs. Without it, only this engine's own samples are
    known. `vocabulary`: number of the model's tokens; answers with other tokens come from another model, and are left
    out.
    """

    def __init__(self, config: DraftConfig, feed: ContextClient | None, vocabulary: int):
        self._vocabulary = vocabulary
        self._settings, self._most_bytes = config.index, config.index_mib << 20
        self._evidence = CandidateScorer(config.index)
        self._feed = feed
        self._running: dict[GroupRef, IndexedGroup] = {}
        self._idle: OrderedDict[GroupRef, IndexedGroup] = OrderedDict()  # least recently used first
        self._idle_tokens = self._idle_nbytes = 0  # of these together: there can be 100,000
        self._builder = ThreadPoolExecutor(1, "history-index")
        self._building: list[tuple[GroupRef, Future[HistoryIndex]]] = []
        self.failed_builds = self.foreign_answers = 0

    def open(self, ref: GroupRef, epoch: int, prompt: np.ndarray) -> IndexedGroup:
        """Returns the group and counts one more running chunk."""
        group = self._running.get(ref)
        if group is None:
            if (group := self._idle.pop(ref, None)) is not None:
                self._count(group, -1)
            else:
                self._make_room()
                group = IndexedGroup(ref, epoch, prompt, GroupIndex(self._evidence, prompt))
            self._running[ref] = group
            if self._feed is not None:
                self._feed.hold(ref)
        group.running += 1
        return group

    def close(self, group: IndexedGroup) -> None:
        """Counts one running chunk fewer."""
        group.running -= 1
        if not group.running:
            self._idle[group.ref] = self._running.pop(group.ref)
            self._count(group, 1)
            if self._feed is not None:
                self._feed.rest(group.ref)

    def _count(self, group: IndexedGroup, sign: int) -> None:
        """Counts an idle group in, by its present sizes, or out (`sign` -1)."""
        if sign > 0:
            group.sizes = group.index.tokens, group.index.whole_nbytes
        self._idle_tokens += sign * group.sizes[0]
        self._idle_nbytes += sign * group.sizes[1]

    def _grown(self, group: IndexedGroup) -> None:
        """Counts a group again, if it is idle: tokens or a history have come late."""
        if group.ref in self._idle:
            self._count(group, -1)
            self._count(group, 1)

    def _find(self, ref: GroupRef) -> IndexedGroup | None:
        return self._running.get(ref) or self._idle.get(ref)

    def receive(self) -> None:
        """Adds tokens from the feed, and attaches histories whose indexes are ready."""
        for fetched in self._feed.take() if self._feed is not None else ():
            group = self._find(fetched.group)
            if group is None:
                continue
            for piece in fetched.pieces:
                group.index.extend(piece.sample_index, piece.start, piece.tokens)
            self._grown(group)
            if fetched.history:
                self._build(group, fetched.history)
        ready = [(ref, future) for ref, future in self._building if future.done()]
        if ready:
            self._building = [item for item in self._building if item not in ready]
            for ref, future in ready:
                self._attach(ref, future)

    def settle(self) -> None:
        """Waits until every received history is indexed, and attaches it. Repeatable replays need this wait."""
        self.receive()
        for _, future in self._building:
            future.exception()
        self.receive()

    def _build(self, group: IndexedGroup, answers: list[PastAnswer]) -> None:
        ours = [answer for answer in answers if self._is_ours(answer.tokens)]
        self.foreign_answers += len(answers) - len(ours)
        arguments = ours, group.epoch, group.prompt, self._settings
        self._building.append((group.ref, self._builder.submit(HistoryIndex.build, *arguments)))

    def _is_ours(self, tokens: np.ndarray) -> bool:
        """Returns whether all tokens are in the vocabulary. One outside would end the engine: its embedding has no such
        row.
        """
        return not len(tokens) or (tokens.min() >= 0 and tokens.max() < self._vocabulary)

    def _attach(self, ref: GroupRef, future: Future[HistoryIndex]) -> None:
        if future.exception() is not None:
            self.failed_builds += 1  # drafts are best effort: without its history the group still has its mates
        elif (group := self._find(ref)) is not None:
            group.index.attach(future.result())
            self._grown(group)

    def _make_room(self) -> None:
        running_nbytes = self.nbytes - self._idle_nbytes
        while self._idle and running_nbytes + self._idle_nbytes > self._most_bytes:
            ref, group = self._idle.popitem(last=False)
            self._count(group, -1)
            if self._feed is not None:
                self._feed.release(ref)

    @property
    def tokens(self) -> int:
        return self._idle_tokens + sum(group.index.tokens for group in self._running.values())

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes of all indexes, with their histories."""
        return self._idle_nbytes + sum(group.index.whole_nbytes for group in self._running.values())

    def close_all(self) -> None:
        """Stops the thread; unfinished histories are dropped."""
        self._builder.shutdown(wait=False, cancel_futures=True)
