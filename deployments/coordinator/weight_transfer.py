"""Phases of a weights update as vLLM's trainer engines drive it: by vLLM's transfer engines, or by weights in memory.

Invariant: nothing is loaded here. `finish` gives the source of weights that are staged whole, and their commit is an
ordinary update. A transfer that breaks off therefore leaves the service as it was, and the next `start` discards it.
With vLLM's engines every replica that `init` found takes part in each phase, since `nccl` waits for all. Used by the
coordinator.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.command import TransferWeights
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import Rejected
from tailrace.deployments.messages.transfer import MEMORY, Transfer, TransferPhase
from tailrace.deployments.staging.slots import is_memory, memory_source

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
        self._backend = ""  # engine of the trainer that has called `init`
        self._is_open = False  # between `start` and `finish`
        self._source = ""  # source of weights in memory

    async def run(self, phase: str, info: Any) -> str | Rejected:
        """Runs one phase. Returns the source to commit after `finish`, else an empty text."""
        wanted = TransferPhase(phase)
        if (reason := self._out_of_order(wanted)) is not None:
            return Rejected(reason=reason)
        try:
            if wanted is TransferPhase.INIT:
                self._backend, info = backend_of(info)
            answer = await self._taken(wanted, info)
        except ValueError as error:
            answer = Rejected(reason=str(error))
        self._note(wanted, taken=not isinstance(answer, Rejected))
        return answer

    def _out_of_order(self, phase: TransferPhase) -> str | None:
        if phase is TransferPhase.START and not self._backend:
            return "start_weight_update before init_weight_transfer_engine"
        if phase in (TransferPhase.PART, TransferPhase.FINISH) and not self._is_open:
            return "no weight update is open; call start_weight_update first"
        return None

    def _note(self, phase: TransferPhase, taken: bool) -> None:
        if phase is TransferPhase.SHUTDOWN or (phase is TransferPhase.INIT and not taken):
            self._backend = ""
        if phase is not TransferPhase.PART:  # an open transfer has ended or is broken off
            self._is_open, self._source = phase is TransferPhase.START and taken, ""

    async def _taken(self, phase: TransferPhase, info: Any) -> str | Rejected:
        if self._backend != MEMORY:
            return await self._on_replicas(phase, info) if self._backend else ""
        if phase is TransferPhase.PART:
            self._source = named_in_memory(info)
        if phase is TransferPhase.FINISH and not self._source:
            raise ValueError("finish_weight_update without update_weights")
        return self._source if phase is TransferPhase.FINISH else ""

    async def _on_replicas(self, phase: TransferPhase, info: Any) -> str | Rejected:
        reports = dict(self._reports())
        if phase is TransferPhase.INIT:
            self._members = tuple(sorted(reports))
            if without := sorted(name for name in reports if reports[name].weight_transfer != self._backend):
                wanted = f"vllm_args: {{weight_transfer_config: {{backend: {self._backend}}}}}"
                raise ValueError(f"{without[0]} has no transfer engine {self._backend}: give its engine {wanted}")
        if not self._members or set(self._members) != reports.keys():
            raise ValueError(f"the replicas are not those that `init` found: {len(reports)} now; init again")
        served = self._served()
        transfer = Transfer(phase=phase, info=info, version=served[0] + 1, served=served)
        calls = [
            self._engines.ask(name, TransferWeights(self._of(transfer, place, name, reports)))
            for place, name in enumerate(self._members)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for name, answer in zip(self._members, answers, strict=True):
            if isinstance(answer, BaseException):
                raise ValueError(f"{phase} of a weight transfer failed on {name}: {one_line(answer)}")
        found = set(filter(None, answers))
        if len(found) > 1:
            raise ValueError(f"the nodes have received different weights: {', '.join(sorted(found))}")
        return next(iter(found), "")

    def _of(self, transfer: Transfer, place: int, name: str, reports: Mapping[str, EngineStats]) -> Transfer:
        """Returns the phase for one replica: its rank in the group, and whether it writes its node's slot (the node's
        first replica does).
        """
        if transfer.phase is TransferPhase.INIT and "rank_offset" in (transfer.info or {}):
            ranks = (transfer.info["world_size"] - transfer.info["rank_offset"]) // len(self._members)
            offset = transfer.info["rank_offset"] + place * ranks
            return replace(transfer, info={**transfer.info, "rank_offset": offset})
        first = min(other for other in self._members if reports[other].node_id == reports[name].node_id)
        if transfer.phase is TransferPhase.FINISH and name != first:
            return replace(transfer, phase=TransferPhase.DROP)
        return transfer


def backend_of(info: Any) -> tuple[str, dict]:
    """Returns the name of a transfer engine and its own `init_info`. Raises ValueError, one line.

    vLLM's trainer engines do not name themselves: NCCL's info holds an address, IPC's only how it packs tensors.
    """
    info = dict(info or {})
    if (named := info.pop("backend", "")) == MEMORY:
        return named, info
    if named:
        raise ValueError(f"init_info: backend {named!r} is not known; {MEMORY} is, and vLLM's nccl and ipc unnamed")
    if "master_address" in info or "nccl_unique_id_b64" in info:
        return "nccl", info
    if set(info) <= {"packed"}:
        return "ipc", info
    raise ValueError(f"init_info: no transfer engine has {', '.join(sorted(info))}; known: nccl, ipc, {MEMORY}")


def named_in_memory(info: Any) -> str:
    """Returns the source in `{"source": "memory:..."}`. Raises ValueError, one line."""
    source = info.get("source") if isinstance(info, dict) else None
    if not is_memory(source):
        raise ValueError(f"update_info: source is {source!r}; the trainer engine {MEMORY} gives memory:...")
    return str(memory_source(source))
