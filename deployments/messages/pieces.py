"""Parts of tensors that one rank of a trainer holds, and the messages by which ranks publish a version together."""

from enum import StrEnum
from math import prod
from typing import NamedTuple

from tailrace.deployments.messages.scores import Score


class TensorForm(NamedTuple):
    """A whole tensor. `kind`: its type, as safetensors names it."""

    name: str
    kind: str
    shape: tuple[int, ...]


class TensorPiece(NamedTuple):
    """A box of values of a whole tensor: from index `start` on, `extent` values along each dimension."""

    tensor: TensorForm
    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def values(self) -> int:
        return prod(self.extent)

    @property
    def is_whole(self) -> bool:
        return self.extent == self.tensor.shape

    def __str__(self) -> str:
        return self.tensor.name if self.is_whole else f"{self.tensor.name} from {list(self.start)}"


class PublishPhase(StrEnum):
    """Calls of a rank, in order. All but `next`, `renew` and `failed` wait for other ranks."""

    NEXT = "next"  # of any client; answered with the lowest version that can be published
    JOIN = "join"  # with a RankPart; answered with a RankPlan once all ranks have joined
    STAGED = "staged"  # with a PieceEnd for each piece of the plan; the leader gets all, others the end
    SEALED = "sealed"  # of the leader, with the source; answered with the end
    RENEW = "renew"  # the rank lives
    FAILED = "failed"  # with the reason, one line; also of a rank that has not joined


class RankPart(NamedTuple):
    """What a rank holds. `node`: where it runs. `leads`: it may write the slot of its node. `timeout_s`: maximum
    seconds for the ranks to join, and again to stage.
    """

    world_size: int
    node: str
    leads: bool
    timeout_s: float
    pieces: tuple[TensorPiece, ...]
    score: Score = ()


class RankPlan(NamedTuple):
    """All tensors, in the order of their files, and the places of the pieces in the rank's part that it writes.
    `ships`: it runs on another node than the stage, and hands its pieces to Ray.
    """

    tensors: tuple[TensorForm, ...]
    written: tuple[int, ...]
    ships: bool = False


class PieceEnd(NamedTuple):
    """The checksum of a rank's own values, and a reference of Ray's to them if they are not written."""

    checksum: str
    shipped: object = None


class StagedPiece(NamedTuple):
    """A piece, and the rank that has staged it."""

    rank: int
    piece: TensorPiece
    end: PieceEnd
