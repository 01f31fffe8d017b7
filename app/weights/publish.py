"""Weights from every rank of a trainer: each stages what it holds, and the service loads the whole.

    loaded = tailrace.weights.publish(7, model)       # on all ranks, FSDP2 or tensor-parallel; nothing is gathered
    publishing = tailrace.weights.begin(8, model)     # returns once this rank's tensors may change
    loaded = publishing.wait()

Invariant: ranks meet through the service alone, never in a collective, and every wait has a limit. A rank that is lost
ends its version on all ranks, and the service keeps its weights.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from queue import Queue

from tailrace.app.calls.blocking import blocking
from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.publishing_rank import PublishingRank, this_node
from tailrace.app.cluster import connect
from tailrace.app.weights.held_pieces import HeldPiece, held_pieces
from tailrace.deployments.messages.pieces import PublishPhase, RankPart
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.messages.scores import Score

TIMEOUT_S = 120.0
"""Maximum seconds for all ranks to join, again for all to stage, and for the leader to seal. Ranks end a step together,
and a rank stages some GB a second.
"""


def publish(version: int, held: object, **settings) -> WeightsLoaded:
    """Publishes a version from all ranks, each with what it holds; to be called on every rank. Returns once the
    replicas hold it. `settings` and errors: those of `begin`, and of `Publishing.wait`.
    """
    return begin(version, held, **settings).wait()


def next_version(client: RolloutClient | None = None) -> int:
    """Returns the lowest version that can be published: above the present one, and above all that have ended. One rank
    asks, and tells the others. `client`: see `begin`.
    """
    return blocking((client or connect()).publishing.run)(PublishPhase.NEXT, 0, 0)


def begin(
    version: int,
    held: object,
    *,
    client: RolloutClient | None = None,
    group: object = None,
    score: Score = (),
    timeout_s: float = TIMEOUT_S,
) -> "Publishing":
    """Stages what this rank holds. Returns once its tensors may change; the rest goes on behind it.

    `held`: a model, a state dict or (name, tensor) pairs, by the names of a saved folder: DTensors, `Slice`s, or whole
    tensors, which ranks may have in common. `client`: by default a new one. `group`: the ranks that publish, a process
    group; by default all of torch.distributed, or this process alone without it. `score`: see `client.update_weights`;
    one rank's is enough. `timeout_s`: see TIMEOUT_S. Raises StageRefused, one line, for a tensor that cannot be staged.
    """
    rank, world_size = _place(group)
    ours = PublishingRank(client or connect(), version, rank, this_node())
    try:
        pieces = held_pieces(held)
    except Exception as error:  # of this rank: the others have to hear of it, and it is raised again
        blocking(ours.give_up)(error)
        raise
    part = RankPart(
        world_size=world_size,
        node="",
        leads=False,
        timeout_s=timeout_s,
        pieces=tuple(one.piece for one in pieces),
        score=tuple(score),
    )
    return Publishing(ours, part, pieces)


class Publishing:
    """A version that this rank publishes, on a thread. `staged_s`: seconds in which its tensors had to stay."""

    def __init__(self, rank: PublishingRank, part: RankPart, pieces: list[HeldPiece]):
        self._result: Queue = Queue(1)
        began_s, staged = time.monotonic(), threading.Event()
        work = rank.publish(part, pieces, staged.set)
        threading.Thread(target=self._run, args=(work, staged), daemon=True, name="publish").start()
        staged.wait()
        self.staged_s = time.monotonic() - began_s

    def wait(self) -> WeightsLoaded:
        """Returns once the replicas hold the version. Raises WeightsRejected, one line, on every rank, if it has ended;
        the service then keeps its weights.
        """
        loaded, error = result = self._result.get()
        self._result.put(result)
        if error is not None:
            raise error
        return loaded.model_copy(update={"staged_s": self.staged_s})

    def _run(self, work: Coroutine, staged: threading.Event) -> None:
        try:
            self._result.put((asyncio.run(work), None))
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: raised again in the caller's
            self._result.put((None, error))
        finally:
            staged.set()


def _place(group: object) -> tuple[int, int]:
    """Returns this process's rank and the number of ranks."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
