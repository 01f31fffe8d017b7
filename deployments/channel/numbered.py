"""One end of a line that may lose messages when a connection breaks, but keeps their order between breaks.

Invariant: numbered messages arrive once each and in order, as long as one side sends unacknowledged messages again
(go-back-N). Messages without a number may be lost. Pure; one object at each end of a line.
"""

import struct
from collections import deque

RESEND_S = 3.0
"""Seconds without progress at the other end after which all unacknowledged messages are sent again."""

HEADER = struct.Struct("<QQ")
"""Number of the message (0 for an unnumbered one), and number of the last message received from the other end."""


class NumberedEnd:
    """Frames are `HEADER` followed by a payload."""

    def __init__(self):
        self._sent = self._received = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._progress_s = 0.0

    def has_come(self, number: int) -> bool:
        """Returns whether the other end has acknowledged this message."""
        return not self._unacknowledged or number < self._unacknowledged[0][0]

    def frame(self, payload: bytes) -> bytes:
        """Returns the frame of a message that may be lost."""
        return HEADER.pack(0, self._received) + payload

    def numbered(self, payload: bytes, now_s: float) -> tuple[int, bytes]:
        """Returns the number and the frame of a message that will arrive."""
        if not self._unacknowledged:
            self._progress_s = now_s
        self._sent += 1
        self._unacknowledged.append((self._sent, payload))
        return self._sent, HEADER.pack(self._sent, self._received) + payload

    def take(self, frame: bytes, now_s: float) -> bytes | None:
        """Returns the payload of a frame from the other end; None if it was received before, or if one before it is
        missing.

        Raises ValueError if it is no frame.
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
        return frame[HEADER.size :]

    def overdue(self, now_s: float) -> list[bytes]:
        """Returns the frames to send again now."""
        if not self._unacknowledged or now_s < self._progress_s + RESEND_S:
            return []
        self._progress_s = now_s
        return [HEADER.pack(number, self._received) + payload for number, payload in self._unacknowledged]
