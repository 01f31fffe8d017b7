"""The phases of a transfer by vLLM's engines, taken to the replicas that began it.

Invariant: every replica of a transfer takes part in each phase, since `nccl` waits for all; if their set has changed
since `init`, a transfer is refused before it begins. Received tensors are staged on every node, never loaded: the
commit is an ordinary update. Used by the coordinator.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import Rejected
from tailrace.deployments.messages.transfer import Transfer, TransferPhase

if TYPE_CHECKING:  # it loads Ray, and this class needs none of it
    from tailrace.deployments.coordinator.engine_client import EngineClient


class WeightTransfer:
    """`reports`: the present replicas. `served`: version and digest of the present weights."""

    def __init__(
        self,
        engines: "EngineClient",
        reports: Callable[[], Mapping[str, EngineStats]],
        served: Callable[[], tuple[int, str]],
    ):
        self._engines, self._reports, self._served = engines, reports, served
        self._members: tuple[str, ...] = ()

    async def run(self, phase: str, info: Any) -> str | Rejected:
        """One phase. Returns the source to commit after `finish`, else an empty text."""
        wanted, reports = TransferPhase(phase), dict(self._reports())
        if wanted is TransferPhase.INIT:
            self._members = tuple(sorted(reports))
        if not self._members or set(self._members) != reports.keys():
            return Rejected(reason=f"the replicas are not those that `init` found: {len(reports)} now; init again")
        served = self._served()
        transfer = Transfer(phase=wanted, info=info, version=served[0] + 1, served=served)
        calls = [
            self._engines.transfer_weights(name, self._of(transfer, place, name, reports))
            for place, name in enumerate(self._members)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for name, answer in zip(self._members, answers, strict=True):
            if isinstance(answer, BaseException):
                return Rejected(reason=f"{phase} of a weight transfer failed on {name}: {one_line(answer)}")
        found = set(filter(None, answers))
        if len(found) > 1:
            return Rejected(reason=f"the nodes have received different weights: {', '.join(sorted(found))}")
        return next(iter(found), "")

    def _of(self, transfer: Transfer, place: int, name: str, reports: Mapping[str, EngineStats]) -> Transfer:
        """The phase as one replica takes it: its rank in the group; its node's slot is written by its first replica."""
        if transfer.phase is TransferPhase.INIT and "rank_offset" in (transfer.info or {}):
            ranks = (transfer.info["world_size"] - transfer.info["rank_offset"]) // len(self._members)
            offset = transfer.info["rank_offset"] + place * ranks
            return replace(transfer, info={**transfer.info, "rank_offset": offset})
        first = min(other for other in self._members if reports[other].node_id == reports[name].node_id)
        if transfer.phase is TransferPhase.FINISH and name != first:
            return replace(transfer, phase=TransferPhase.DROP)
        return transfer
