"""One phase of a transfer of weights as vLLM's trainer engines drive it: by its own (`nccl`, `ipc`), or by memory."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MEMORY = "tailrace_memory"
"""Our transfer engine's name: the trainer stages its weights whole in shared memory, and gives their source."""


class TransferPhase(StrEnum):
    """In this order; `part` may come several times."""

    INIT = "init"  # workers meet the trainer
    START = "start"  # forget the rest of an earlier transfer
    PART = "part"  # receive tensors, apart from the model
    FINISH = "finish"  # of one replica of each node: into the node's slot
    DROP = "drop"  # of the other replicas
    SHUTDOWN = "shutdown"  # workers leave the trainer


@dataclass(frozen=True, slots=True)
class Transfer:
    """`info`: vLLM's own, by phase. `version`, `served`: of the weights that come, and those whose slot is kept.

    `service`: name of the slots; filled in by the replica.
    """

    phase: TransferPhase
    info: Any = None
    version: int = 0
    served: tuple[int, str] = (0, "")
    service: str = ""
