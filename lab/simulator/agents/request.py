"""A turn on its way through a modelled cluster, and the counts that come out of it."""

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it makes requests
    from tailrace.lab.simulator.agents.host import SessionRun


class AgentRequest:
    """`context`: tokens of the prompt and of what has been made; `tokens`: those still to make in this stay.
    `cacheable`: tokens of the context that line `source` may hold; `left`: tokens of prefill that are not done;
    `ticket`: number of admissions; `sample`: the core's name for its line. `sent_s`: when a replica had it last;
    `fetch_s`: seconds that KV took to come since."""

    __slots__ = ("arrived_s", "cacheable", "context", "counts", "fetch_s", "forks", "index", "known", "left", "line",
                 "made", "number", "run", "sample", "sent_s", "since", "source", "ticket", "tokens",
                 "turn")  # fmt: skip

    def __init__(self, run: "SessionRun", index: int, counts: "AgentCounts", arrived_s: float):
        self.run, self.index, self.counts, self.arrived_s = run, index, counts, arrived_s
        turn = self.turn = run.session.turns[index]
        self.line = (run, turn.line)
        self.source = self.line if turn.source is None else (run, turn.source)
        self.forks, self.context = turn.forks, turn.context
        self.cacheable = self.known = turn.known
        self.tokens, self.made, self.left = turn.out, 0, 0.0
        self.number, self.since, self.ticket, self.sample = 0, 0.0, 0, None
        self.sent_s, self.fetch_s = arrived_s, 0.0

    def found(self, here: int, fetched: int, slow: bool, computed: int) -> None:
        """Records the sources of its context as it is admitted."""
        self.left = float(computed)
        counts = self.counts
        counts.recomputed += max(0, computed - (self.context - self.known))
        if not self.ticket:  # else it goes on after a chunk, or after it was preempted
            counts.hbm += here
            counts.ssd += fetched if slow else 0
            counts.dram += 0 if slow else fetched
            counts.known += self.known
        self.ticket += 1

    def begins(self, now: float) -> None:
        """Records its first token."""
        if not self.made:
            self.counts.waits.append(now - self.arrived_s)
            self.counts.at_replica.append(now - self.sent_s)
            self.counts.fetches.append(self.fetch_s)

    def ends(self) -> None:
        """Takes the tokens of a stay; what is in the context now is known."""
        self.made += self.tokens
        self.context += self.tokens
        self._settle()
        self.tokens = self.turn.out - self.made

    def preempted(self, grown: int) -> None:
        """Takes the tokens so far: the first one, which a prefill makes, and `grown` more. The KV is lost. A prefill
        that was not over begins again.
        """
        self.counts.preemptions += 1
        if not self.number:
            self.known, self.left = max(self.known, self.context - ceil(self.left)), 0.0
            return
        made = min(1 + grown, self.tokens - 1)
        self.made += made
        self.tokens -= made
        self.context += made
        self._settle()

    def _settle(self) -> None:
        self.number, self.left = 0, 0.0
        self.source, self.forks = self.line, False
        self.cacheable = self.known = self.context


@dataclass(slots=True)
class AgentCounts:
    """Sums over requests: tokens by source. By request: seconds to the first token, those since a replica had it, and
    those in which its KV came.
    """

    hbm: int = 0
    dram: int = 0
    ssd: int = 0
    recomputed: int = 0
    known: int = 0
    preemptions: int = 0
    suspended: int = 0
    work_s: float = 0.0  # of turns that ended: see `AgentReplica.work_s`
    waits: list[float] = field(default_factory=list)
    at_replica: list[float] = field(default_factory=list)
    fetches: list[float] = field(default_factory=list)
