"""Ways to feed a trainer: how far ahead of it samples are made, and under which weights.

| mode | a step's samples are of | a step's gradients begin |
|---|---|---|
| sync | its own weights | after its last sample |
| overlap | its own weights | as its groups end |
| one_step_off | the weights before its own | after its last sample |
| bounded | weights at most `max_staleness` updates old; one sample may have several | as its groups end |
| bounded_groups | the same; a step has the groups that end, from whatever step's questions | as its groups end |
"""

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    SYNC = "sync"
    OVERLAP = "overlap"
    ONE_STEP_OFF = "one_step_off"
    BOUNDED = "bounded"
    BOUNDED_GROUPS = "bounded_groups"


@dataclass(frozen=True)
class Lookahead:
    """`ahead`: steps whose samples are started before their turn. `drains`: weights wait until all started samples have
    ended, so a sample has one version. `whole`: gradients wait for the step's last sample.
    """

    ahead: int
    drains: bool
    whole: bool

    @property
    def on_policy(self) -> bool:
        return self.ahead == 0


def lookahead_of(mode: Mode, max_staleness: int) -> Lookahead:
    """Returns the lookahead of a mode. `max_staleness`: updates, for `bounded` and `bounded_groups`.

    In `bounded`, groups taken stay within (max_staleness + version + 1) x groups of a step: AReaL's admission by
    capacity (arXiv 2505.24298, 4.1). A version grows by one a step, so a step's groups are admitted together.
    """
    return {
        Mode.SYNC: Lookahead(ahead=0, drains=True, whole=True),
        Mode.OVERLAP: Lookahead(ahead=0, drains=True, whole=False),
        Mode.ONE_STEP_OFF: Lookahead(ahead=1, drains=True, whole=True),
        Mode.BOUNDED: Lookahead(ahead=max_staleness, drains=False, whole=False),
        Mode.BOUNDED_GROUPS: Lookahead(ahead=max_staleness, drains=False, whole=False),
    }[mode]
