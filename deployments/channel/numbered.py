"""One end of a line that may lose messages when a connection breaks, but keeps their order between breaks.

Invariant: numbered messages arrive once each and in order, as long as one side sends unacknowledged messages again
(go-back-N). Messages without a number may be lost. No clock of its own; one object at each end of a line.
"""

import struct
from collections import deque
from collections.abc import Callable
from typing import Any

RESEND_S = 3.0
"""Seconds without progress at the other end after which all unacknowledged messages are sent again."""

HEADER = struct.Struct("<QQ")
"""Number of the message (0 for an unnumbered one), and number of the last message received from the other end."""


class NumberedEnd:
    """Frames are `HEADER` and an encoded message. `encode`, `decode`: convert one. `send`: sends or loses a frame."""

    def __init__(self, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], send: Callable[[bytes], None]):
        self._encode, self._decode, self._send_frame = encode, decode, send
        self._sent = self._received = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._progress_s = 0.0

    def has_come(self, number: int) -> bool:
        """Returns whether the other end has acknowledged this message."""
        return not self._unacknowledged or number < self._unacknowledged[0][0]

    def send_once(self, message: Any) -> None:
        """Sends a message that may be lost."""
        self._put(0, self._encode(message))

    def send(self, message: Any, now_s: float) -> int:
        """Sends a message that will arrive. Returns its number."""
        payload = self._encode(message)
        if not self._unacknowledged:
            self._progress_s = now_s
        self._sent += 1
        self._unacknowledged.append((self._sent, payload))
        self._put(self._sent, payload)
        return self._sent

    def take(self, frame: bytes, now_s: float) -> Any | None:
        """Returns the message of a frame from the other end; None if it was received before, or if one before it is
        missing.

        Raises ValueError if it is no frame, and what `decode` raises.
        """
        if len(frame) < HEADER.size:
            raise ValueError(f"a frame of {len(frame)} bytes; a header has {HEADER.size}")
        number, acknowledged = HEADER.unpack_from(frame)
        if acknowledged > self._sent:
            raise ValueError(f"message {acknowledged} is acknowledged, {self._sent} were sent")
        while self._unacknowledged and self._unacknowledged[0][0] <= acknowledged:
            self._unacknowledged.popleft()
            self._progress_s = now_s
        if number not in (0, self._received + 1):
            return None
        self._received = max(self._received, number)
        return self._decode(frame[HEADER.size :])

    def resend(self, now_s: float) -> None:
        """Sends unacknowledged messages again, if they are overdue."""
        if self._unacknowledged and now_s >= self._progress_s + RESEND_S:
            self._progress_s = now_s
            for number, payload in self._unacknowledged:
                self._put(number, payload)

    def _put(self, number: int, payload: bytes) -> None:
        self._send_frame(HEADER.pack(number, self._received) + payload)
