"""Versions of weights that the ranks of a trainer publish together: who has joined, who has staged, and how it ends.

Invariant: a version ends once, for all ranks alike. A rank that is late, silent, sends twice, or holds what does not
fit ends its version and nothing else: it was not committed, so the service keeps its weights. No wait for a rank is
longer than the ranks' own limit. The ranks write the bytes, see `deployments.staging`. Used by the coordinator.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.pieces import PieceEnd, PublishPhase, RankPart, RankPlan, StagedPiece
from tailrace.deployments.messages.rollout import Rejected, WeightsLoaded
from tailrace.deployments.staging.publish_plan import plans_of
from tailrace.deployments.staging.slots import MemorySource

LOOK_S = 0.5
"""Seconds between two looks for a rank that is late or silent."""

SILENT_S = 30.0
"""Seconds without a renewal after which a rank counts as dead: one that computes may hold its interpreter for some."""

STALL_S = 2.0
"""Length of a look that shows that this process has stalled: renewals may wait unread."""

NOTHING = RankPart(world_size=1, node="", leads=False, timeout_s=0.0, pieces=())
"""The part of a rank that gives up before it joins."""

Load = Callable[..., Awaitable[WeightsLoaded | Rejected]]
"""Has the replicas load a version from a source, with its digest and a score."""


class Publication:
    """One version. `world_size`, `timeout_s`: as its first rank gives them; see `RankPart`."""

    def __init__(self, version: int, first: RankPart):
        loop = asyncio.get_running_loop()
        self.version, self._first, self._now = version, first, loop.time
        self.parts: dict[int, RankPart] = {}
        self._staged: dict[int, tuple[PieceEnd, ...]] = {}
        self._heard_s: dict[int, float] = {}
        self._since_s = loop.time()  # begin of the present phase
        self.plans: asyncio.Future[dict[int, RankPlan]] = loop.create_future()
        self.pieces: asyncio.Future[tuple[StagedPiece, ...]] = loop.create_future()
        self.outcome: asyncio.Future[WeightsLoaded | Rejected] = loop.create_future()
        self.outcome.add_done_callback(self._let_go)
        self.sealed = False  # True once the version needs its ranks no more

    async def watch(self) -> None:
        """Ends the version once a rank is late or silent. Returns when it is sealed, or has ended."""
        while not (self.sealed or self.outcome.done()):
            began_s = self._now()
            await asyncio.sleep(LOOK_S)
            if self._now() > began_s + STALL_S:
                self._heard_s = dict.fromkeys(self._heard_s, self._now())
            if (reason := self._absent()) is not None:
                self.end(reason)

    def end(self, reason: str) -> None:
        """Ends the version for all ranks, unless it is sealed or has ended."""
        if not (self.sealed or self.outcome.done()):
            self.outcome.set_result(Rejected(reason=f"weights {self.version}: {reason}; the service keeps its weights"))

    def renew(self, rank: int) -> None:
        self._heard_s[rank] = self._now()

    async def first_of(self, future: asyncio.Future) -> Any:
        """Returns the future's result, or the end of the version if that is first."""
        await asyncio.wait({future, self.outcome}, return_when=asyncio.FIRST_COMPLETED)
        return self.outcome.result() if self.outcome.done() else future.result()

    async def join(self, rank: int, part: RankPart) -> None:
        """Adds a rank's part. The last one makes the plan."""
        if (reason := self._misfit(rank, part)) is not None:
            return self.end(reason)
        self.parts[rank] = part
        self.renew(rank)
        if len(self.parts) < part.world_size:
            return None
        if not any(one.leads for one in self.parts.values()):
            return self.end("other weights of this service are being staged on the ranks' node; commit or drop them")
        try:
            pieces = {number: one.pieces for number, one in self.parts.items()}
            plans = await asyncio.to_thread(plans_of, pieces, self._away())
        except (ValueError, KeyError, TypeError) as error:
            return self.end(str(error) if type(error) is ValueError else one_line(error))
        self._since_s = self._now()
        self.plans.set_result(plans)
        return None

    def stage(self, rank: int, ends: tuple[PieceEnd, ...]) -> None:
        """Records that a rank has staged its pieces, in the plan's order."""
        if rank in self._staged:
            return self.end(f"rank {rank} has staged twice")
        self._staged[rank] = ends
        self.renew(rank)
        if len(self._staged) == len(self.parts):
            plans = self.plans.result()
            self.pieces.set_result(
                tuple(
                    StagedPiece(number, self.parts[number].pieces[place], end)
                    for number, found in self._staged.items()
                    for place, end in zip(plans[number].written, found, strict=True)
                )
            )
            self._since_s = self._now()
        return None

    def _misfit(self, rank: int, part: RankPart) -> str | None:
        world_size = self._first.world_size
        if rank in self.parts:
            return f"rank {rank} has sent it twice"
        if part.world_size != world_size:
            return f"rank {rank} is one of {part.world_size} ranks, and the first to come one of {world_size}"
        if not 0 <= rank < world_size:
            return f"rank {rank} is none of {world_size}"
        return None

    def _let_go(self, _: asyncio.Future) -> None:
        """Drops the pieces, which Ray holds for as long as they are referred to here."""
        self._staged.clear()
        self.pieces = asyncio.get_running_loop().create_future()

    def _absent(self) -> str | None:
        """Returns which rank is late or silent, or None."""
        now, awaited, living, verb = self._now(), *self._awaited()
        for rank in sorted(living):
            if now > self._heard_s[rank] + SILENT_S:
                return f"rank {rank} has been silent for {SILENT_S:g} s"
        if now > self._since_s + self._first.timeout_s:
            return f"{_ranks(sorted(awaited))} not {verb} within {self._first.timeout_s:g} s"
        return None

    def _awaited(self) -> tuple[set[int], set[int], str]:
        """Returns the ranks whose step is awaited, those that must renew, and the step."""
        if not self.plans.done():
            return set(range(self._first.world_size)) - self.parts.keys(), set(self.parts), "joined"
        late = self.parts.keys() - self._staged.keys()
        return (late, late, "staged") if late else ({self.leader}, {self.leader}, "sealed")

    def _away(self) -> set[int]:
        """Returns the ranks that run on other nodes than the leader."""
        home = self.parts[self.leader].node
        return {rank for rank, part in self.parts.items() if part.node != home}

    @property
    def leader(self) -> int:
        """The rank that writes the slot: the lowest of those that may."""
        return next(rank for rank, part in sorted(self.parts.items()) if part.leads)


class Publications:
    """`served`: returns the present version. `load`: see Load. `spawn`: runs a coroutine as a task that is kept.

    `looked`: returns once the replicas' reports have been read, from which a new coordinator knows the version.
    """

    def __init__(
        self,
        served: Callable[[], int],
        load: Load,
        spawn: Callable[..., object],
        looked: Callable[[], Awaitable[object]],
    ):
        self._served, self._load, self._spawn, self._looked = served, load, spawn, looked
        self._latest: Publication | None = None

    async def run(self, phase: str, version: int, rank: int, content: Any = None) -> Any:
        """Runs one phase of a rank, see PublishPhase. Returns its answer, or Rejected once the version has ended."""
        wanted = PublishPhase(phase)
        await self._looked()
        if wanted is PublishPhase.NEXT:
            return max(self._served(), self._latest.version if self._latest else 0) + 1
        if wanted is PublishPhase.JOIN:
            return await self._join(version, rank, content)
        if wanted is PublishPhase.FAILED:
            opened = self._opened(version, rank, NOTHING)
            return opened if isinstance(opened, Rejected) else opened.end(f"rank {rank}: {content}")
        publication = self._latest
        if publication is None or publication.version != version or rank not in publication.parts:
            return Rejected(reason=f"weights {version}: rank {rank} has not joined it here; publish a higher version")
        if publication.outcome.done():
            return publication.outcome.result()
        return await self._joined(publication, wanted, rank, content)

    async def _joined(self, publication: Publication, phase: PublishPhase, rank: int, content: Any) -> Any:
        if phase is PublishPhase.RENEW:
            return publication.renew(rank)
        if phase is PublishPhase.STAGED:
            publication.stage(rank, content)
        elif not publication.sealed:
            publication.sealed = True
            self._spawn(self._commit(publication, content))
        leads = phase is PublishPhase.STAGED and rank == publication.leader
        return await publication.first_of(publication.pieces if leads else publication.outcome)

    async def _join(self, version: int, rank: int, part: RankPart) -> RankPlan | Rejected:
        latest = self._opened(version, rank, part)
        if isinstance(latest, Rejected):
            return latest
        if latest.outcome.done() and isinstance(ended := latest.outcome.result(), Rejected):
            return ended
        if latest.sealed:
            return Rejected(reason=f"weights {version}: rank {rank} has sent it twice; it is loaded once")
        await latest.join(rank, part)
        plans = await latest.first_of(latest.plans)
        return plans if isinstance(plans, Rejected) else plans[rank]

    def _opened(self, version: int, rank: int, part: RankPart) -> Publication | Rejected:
        """Returns the publication of a version, which begins with the first call of any rank; or why there is none."""
        latest = self._latest
        if latest is None or latest.version < version:
            if version <= self._served():
                return Rejected(reason=f"weights version {version} is not above {self._served()}; versions only grow")
            if latest is not None:
                latest.end(f"rank {rank} has gone on to {version}")
            latest = self._latest = Publication(version, part)
            self._spawn(latest.watch())
        elif latest.version > version:
            return Rejected(reason=f"weights {version}: rank {rank} is late; others have gone on to {latest.version}")
        return latest

    async def _commit(self, publication: Publication, source: MemorySource) -> None:
        score = next((part.score for _, part in sorted(publication.parts.items()) if part.score), ())
        try:
            outcome = await self._load(publication.version, str(source), source.digest, score)
        except Exception as error:  # noqa: BLE001 - of the update: every rank has to hear of it
            outcome = Rejected(reason=f"weights {publication.version}: {one_line(error)}")
        publication.outcome.set_result(outcome)


def _ranks(ranks: list[int]) -> str:
    """Returns the ranks and their verb."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))} have"
