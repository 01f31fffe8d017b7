"""One phase of a transfer of weights as vLLM's trainer engines drive it: by vLLM's engines (`nccl`, `ipc`), or by
memory.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MEMORY = "tailrace_memory"
"""Our transfer engine's name: the trainer stages its weights whole in shared memory, and gives their source."""


class TransferPhase(StrEnum):
    """Phases in order; `part` may occur several times."""

    INIT = "init"  # workers meet the trainer
    START = "start"  # discard an earlier transfer
    PART = "part"  # receive tensors, apart from the model
    FINISH = "finish"  # for one replica of each node: writes the node's slot
    DROP = "drop"  # for the other replicas
    SHUTDOWN = "shutdown"  # workers leave the trainer


@dataclass(frozen=True, slots=True)
class Transfer:
    """`info`: vLLM's own fields of the phase. `version`: version of the new weights. `served`: weights whose slot is
    kept.

    `service`: name of the slots; filled in by the replica.
    """

    phase: TransferPhase
    info: Any = None
    version: int = 0
    served: tuple[int, str] = (0, "")
    service: str = ""
