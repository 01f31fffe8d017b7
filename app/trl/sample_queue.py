"""The queue that an asynchronous trainer draws samples from. It reports draws, and when the trainer waits."""

import queue
from collections.abc import Callable

_ENDED = object()


class SampleQueue(queue.Queue):
    """`on_drawn`: called with each drawn sample, on the trainer's thread. `on_wait`: called when the queue is empty."""

    def __init__(self, on_drawn: Callable[[object], None], on_wait: Callable[[], None]):
        super().__init__()
        self._on_drawn, self._on_wait = on_drawn, on_wait
        self.waiting = False

    def get(self, block: bool = True, timeout: float | None = None):
        """Returns the next sample. Raises `queue.Empty` after `timeout` seconds, and at once after `end`."""
        try:
            if self.empty():
                self.waiting = True
                self._on_wait()
            sample = super().get(block, timeout)
        finally:
            self.waiting = False
        if sample is _ENDED:
            self.end()  # for the next call
            raise queue.Empty
        self._on_drawn(sample)
        return sample

    def end(self) -> None:
        """Closes the queue: a trainer that waits is woken, and reads the reason."""
        self.put(_ENDED)
