"""Limit on how far samples may be ahead of an asynchronous trainer. AReaL's rule: it needs no clock.

Samples that were taken, less those that the trainer dropped as stale, reach up to (max_staleness + version + 1) x
samples of a version. A sample is therefore trained at most `max_staleness` versions after its first token, if each
version has the expected number of samples. Used by `async_rollouts`; pure.
"""

import sys
from dataclasses import dataclass


@dataclass
class Allowance:
    """Numbers of samples, except `version`: versions since the start, which is 0.

    `per_version`: samples drawn under one version; with `fixed` False a first guess, and then their mean. `at_once`:
    samples drawn for one micro-batch. `max_in_hand`: maximum taken and not yet drawn. `max_in_flight`: maximum taken
    and not yet queued.
    """

    group: int
    per_version: int
    max_staleness: int
    at_once: int
    fixed: bool = True
    max_in_hand: int = sys.maxsize
    max_in_flight: int = sys.maxsize
    version: int = 0
    taken: int = 0
    queued: int = 0
    drawn: int = 0
    dropped: int = 0

    def groups(self, waiting: bool) -> int:
        """Returns the number of groups that may be started now. `waiting`: the trainer waits for a sample.

        A trainer that waits with nothing in hand gets a micro-batch: accelerate draws the next one before the present
        one is trained, which exceeds the rule if `max_staleness` is 0.
        """
        in_hand, in_flight = self.taken - self.drawn, self.taken - self.queued
        wanted = (self.max_staleness + self.version + 1) * self._samples_of_a_version() - (self.taken - self.dropped)
        if waiting and not in_hand:
            wanted = max(wanted, self.at_once)
        room = min(self.max_in_hand - in_hand, self.max_in_flight - in_flight) // self.group
        return max(0, min(-(-wanted // self.group), room))

    def _samples_of_a_version(self) -> int:
        if self.fixed or not self.version:
            return self.per_version
        return max(1, (self.drawn - self.dropped) // (self.version + 1))
