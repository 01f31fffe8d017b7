"""Parts of a client that survives the coordinator's loss: heartbeat, retries, and the errors that mean a loss."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from tailrace.deployments.messages.delivery import ACKNOWLEDGE_BYTES, result_bytes
from tailrace.deployments.messages.liveness import RENEW_S
from tailrace.deployments.messages.rollout import GroupResult

PAUSE_S = (0.2, 5.0)
"""Minimum and maximum seconds before a lost service is asked again."""


class Heartbeat:
    """Calls `beat` every RENEW_S, on a thread of its own: a driver's event loop may be busy for minutes."""

    def __init__(self, beat: Callable[[], object]):
        self._beat, self._stopped = beat, threading.Event()
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(RENEW_S):
            with contextlib.suppress(Exception):  # the service is unreachable; the stream itself raises
                self._beat()


class ReceivedGroups:
    """Counts the groups that the caller has received. `send`: sends their number, without waiting for an answer."""

    def __init__(self, send: Callable[[int], object]):
        self._send, self.count, self._bytes = send, 0, 0

    def send(self) -> object:
        self._bytes = 0
        return self._send(self.count)

    def add(self, group: GroupResult) -> None:
        """Counts one more group. A number that is lost goes with the next renewal of the lease."""
        self.count += 1
        self._bytes += result_bytes(group)
        if self._bytes >= ACKNOWLEDGE_BYTES:
            with contextlib.suppress(*lost_service()):
                self.send()


class Interrupted(Exception):
    """A call has broken off, and may be repeated. `cause`: the error; `for_s`: maximum seconds of repetition since the
    first error with the same limit; `pause_s`: minimum seconds before the next try.
    """

    def __init__(self, cause: Exception, for_s: float = float("inf"), pause_s: float = 0.0):
        super().__init__(str(cause))
        self.cause, self.for_s, self.pause_s = cause, for_s, pause_s


class Retries:
    """Limit of the repetition of a call: up to `resume_s` seconds since the last progress. `is_again`: True once it is
    repeated.
    """

    def __init__(self, resume_s: float):
        self._resume_s, self.is_again = resume_s, False
        self.renew()

    def renew(self) -> None:
        """Records progress."""
        self._since_s: dict[float, float] = {}  # first break of each bound, by the bound
        self._pause_s = PAUSE_S[0]

    async def wait(self, broken: Interrupted) -> None:
        """Pauses; the pauses grow. Raises the cause once the limit is exceeded."""
        now, self.is_again = asyncio.get_running_loop().time(), True
        began_s = self._since_s.setdefault(broken.for_s, now)
        if now - began_s >= broken.for_s or now - min(self._since_s.values()) >= self._resume_s:
            raise broken.cause
        await asyncio.sleep(max(self._pause_s, broken.pause_s))
        self._pause_s = min(PAUSE_S[1], 2 * self._pause_s)


def lost_service() -> tuple[type[Exception], ...]:
    """Returns the errors that mean that the coordinator is gone or unreachable, not that it has refused something."""
    from ray import exceptions
    from ray.serve.exceptions import DeploymentUnavailableError

    return (
        exceptions.RayActorError,
        exceptions.OutOfMemoryError,  # Ray has killed it, since the node was running out of memory
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
        exceptions.RaySystemError,
        exceptions.ObjectLostError,
        exceptions.RpcError,
        DeploymentUnavailableError,
        ConnectionError,
    )


@contextlib.contextmanager
def interrupted_by_loss() -> Iterator[None]:
    """Raises Interrupted in place of an error that means that the coordinator is lost."""
    try:
        yield
    except lost_service() as error:
        raise Interrupted(error) from error
