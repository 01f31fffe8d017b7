"""`tailrace.weights.publish`: weights from every rank of a trainer. See docs/driver.md."""

from tailrace.app.weights.held_pieces import Slice
from tailrace.app.weights.publish import Publishing, begin, next_version, publish

__all__ = ["Publishing", "Slice", "begin", "next_version", "publish"]
