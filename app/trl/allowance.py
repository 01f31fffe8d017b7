"""Limit on how far samples may be ahead of an asynchronous trainer. AReaL's rule: it needs no clock.

Samples that were taken, less those that the trainer dropped as stale, reach up to (max_staleness + version + 1) x
samples of a version. A sample is therefore trained at most `max_staleness` versions after its first token, if each
version and each group has the expected number of samples. Used by `async_worker`; pure.
"""

import math
import sys
from dataclasses import dataclass


@dataclass
class Allowance:
    """Numbers of samples, except `version`: versions since the start, which is 0; and `begun`, `ended`: of groups.

    `group`: samples that a group is begun for; it ends with as many, or with any number if they have `branches`. Until
    one has ended, groups for one version alone are begun then: each may be several times as large.

    `per_version`: samples drawn under one version; with `fixed` False a first guess, and then their mean. `at_once`:
    samples drawn for one micro-batch. `max_in_hand`: maximum taken and not yet drawn. `max_in_flight`: maximum begun
    and not yet queued.
    """

    group: int
    per_version: int
    max_staleness: int
    at_once: int
    fixed: bool = True
    branches: bool = False
    max_in_hand: int = sys.maxsize
    max_in_flight: int = sys.maxsize
    version: int = 0
    begun: int = 0
    ended: int = 0
    queued: int = 0
    drawn: int = 0
    dropped: int = 0

    def end(self, samples: int) -> None:
        """Counts a group that has ended with so many samples."""
        self.ended += 1
        self.queued += samples

    def groups(self, waiting: bool) -> int:
        """Returns the number of groups that may be started now. `waiting`: the trainer waits for a sample.

        A trainer that waits with nothing in hand gets a micro-batch: accelerate draws the next one before the present
        one is trained, which exceeds the rule if `max_staleness` is 0.
        """
        of_a_group = self._samples_of_a_group()
        taken = self.queued + (self.begun - self.ended) * of_a_group
        in_hand = taken - self.drawn
        wanted = (self.max_staleness + self.version + 1) * self._samples_of_a_version() - (taken - self.dropped)
        if self.branches and not self.ended:
            wanted = min(wanted, self.per_version - taken)
        if waiting and not in_hand:
            wanted = max(wanted, self.at_once)
        room = max((self.max_in_hand - in_hand) // of_a_group, 0 if in_hand else 1)
        free = (self.max_in_flight - self.in_flight) // self.group
        return max(0, int(min(math.ceil(wanted / of_a_group), room, free)))

    @property
    def in_flight(self) -> int:
        """Samples that were begun and have not been queued; branches do not count."""
        return (self.begun - self.ended) * self.group

    def _samples_of_a_group(self) -> float:
        return self.queued / self.ended if self.ended else self.group

    def _samples_of_a_version(self) -> int:
        if self.fixed or not self.version:
            return self.per_version
        return max(1, (self.drawn - self.dropped) // (self.version + 1))
