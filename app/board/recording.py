"""A recorded run in the format of the board: deltas by time, and the known history of each sample. Pure.

`lab.timeline.playback` makes it from a journal; the page applies the deltas up to the moment that a slider selects.
"""

from dataclasses import dataclass
from typing import Any

from tailrace.deployments.feed.deltas import Sections


@dataclass(frozen=True, slots=True)
class Recording:
    """`frames`: (seconds since the start, changes). `samples`: by id, as `/board/sample` returns them."""

    name: str
    frames: tuple[tuple[float, Sections], ...]
    samples: dict[str, dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "frames": [{"at_s": at_s, "sections": changes} for at_s, changes in self.frames]}
