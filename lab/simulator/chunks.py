"""Records of the host and the replicas about a group, a sample and a running chunk.

Plain records. Invariant: only `SimulatedSample.length` is unknown to the real service; it leaves the host in `ended`
alone, and for the oracle. Written by `Host` and `Replica`, read by `Speculation`.
"""

from typing import NamedTuple

from tailrace.lab.simulator.types import Gap, WorkloadGroup


class GroupProgress:
    """A group of a step, and the number of its samples that have begun to run."""

    __slots__ = ("begun", "group", "step")

    def __init__(self, group: WorkloadGroup, step: int):
        self.group, self.step, self.begun = group, step, 0


class FreedKv(NamedTuple):
    """The place of a sample's freed KV: on the replica of this index, which had written `written` tokens of KV by then
    and writes over `slack` more before it comes to these."""

    replica: int
    written: float
    slack: float


class SimulatedSample:
    """`made`: tokens at the end of its last chunk; `stored`: of its context, tokens that the pool holds; `fresh`: those
    that have never been computed; `outside`: those that came between its turns, `turn` of them being over;
    `began_with`: the context with which the present turn began."""

    __slots__ = ("began_with", "begun", "chunks", "drafted", "draws", "freed_kv", "fresh", "gaps", "index",
                 "kv_version", "length", "made", "moves", "outside", "preemptions", "progress", "recomputed",
                 "replica", "returned", "sample_id", "stored", "submitted_s", "turn", "verifications")  # fmt: skip

    def __init__(self, progress: GroupProgress, index: int, submitted_s: float):
        self.progress, self.index, self.submitted_s = progress, index, submitted_s
        self.sample_id = self.name
        self.length = progress.group.lengths[index]
        self.gaps = progress.group.gaps[index] if progress.group.gaps else ()
        self.fresh = self.began_with = progress.group.prompt_tokens
        self.outside = self.turn = self.returned = 0
        self.begun, self.kv_version = False, 0
        self.made = self.stored = self.chunks = self.moves = self.preemptions = self.recomputed = self.draws = 0
        self.verifications = self.drafted = 0.0
        self.freed_kv: FreedKv | None = None
        self.replica = None  # where its last chunk ran, or runs

    @property
    def name(self) -> str:
        """Returns its id in the workload; a later turn that is a request of its own has another `sample_id`."""
        return f"{self.progress.group.group_id}#{self.index}"

    @property
    def gap(self) -> Gap | None:
        """Returns the gap after the present turn, or None after the last one."""
        return self.gaps[self.turn] if self.turn < len(self.gaps) else None

    @property
    def until(self) -> int:
        """Returns the tokens at which the present turn ends."""
        return self.gap.tokens if self.gap else self.length

    @property
    def context(self) -> int:
        return self.progress.group.prompt_tokens + self.outside + self.made

    def begin_turn(self) -> None:
        """Continues after a tool's answer."""
        self.returned += self.context - self.fresh
        self.outside += self.gap.outside_tokens
        self.fresh += self.gap.outside_tokens
        self.began_with = self.context
        self.turn += 1

    def take(self, chunk: "SimulatedChunk") -> None:
        """Adds the tokens of a chunk of this sample that has stopped, and counts."""
        self.made += int(chunk.made)
        self.fresh = 0
        self.stored, self.freed_kv, self.replica = chunk.stored, chunk.freed_kv, chunk.replica
        self.verifications += chunk.verifications
        self.drafted += chunk.drafted


class SimulatedChunk:
    """A chunk that is to make `tokens` tokens, as a replica runs it.

    At virtual step `since` it has made `made`; from there it makes `rate` tokens a step, of which it computes `cost`,
    and ends at `end_step`. Before its first step it computes `prefill` tokens of its context; `pulled` come from the
    pool, which holds `stored`. It takes part in the share `part` of the steps. `over`: it has left its replica for
    good; `keeps`: then its new KV is stored. `method`: None unless it is a copy that races; then the draft method that
    it races with. Its sample changes only by `Sample.take`.
    """

    __slots__ = ("aborted", "accepted_last", "begin_made", "begin_s", "begin_step", "chunk_id",
                 "class_starts", "context", "cost", "drafted", "drafted_last", "end_step",
                 "expected_tokens", "freed_kv", "keeps", "made", "method", "over", "part", "prefill",
                 "pulled", "rate", "replica", "running", "sample", "serial", "since", "slot", "start",
                 "stored", "tested", "tests", "tokens", "verifications", "verified",
                 "weights_version")  # fmt: skip

    def __init__(
        self, chunk_id: str, sample: SimulatedSample, tokens: int, expected_tokens: int, class_starts: tuple[int, int]
    ):
        self.chunk_id, self.sample, self.tokens = chunk_id, sample, tokens
        self.expected_tokens, self.class_starts = expected_tokens, class_starts
        self.start, self.stored, self.replica = sample.made, sample.stored, sample.replica
        self.context = sample.context  # as it starts
        self.prefill = self.pulled = 0
        self.made, self.since, self.rate, self.cost, self.part = 0.0, 0, 1.0, 1.0, 1.0
        self.begin_s, self.begin_step, self.begin_made = 0.0, 0, 0  # of its run without a break
        self.end_step = self.serial = self.verified = self.drafted_last = self.accepted_last = 0
        self.slot, self.weights_version = -1, 0
        self.verifications = self.drafted = self.tested = 0.0
        self.tests = 0.0  # draft tokens tested per step
        self.method: str | None = None
        self.running = self.aborted = self.over = False
        self.keeps = True
        self.freed_kv: FreedKv | None = None  # set while it waits to recompute its lost KV

    @property
    def generated(self) -> int:
        """Returns the answer tokens at step `since`."""
        return self.start + int(self.made)

    @property
    def accepted(self) -> float:
        """Returns the accepted draft tokens: every verification makes one token besides."""
        return max(0.0, int(self.made) - self.verifications)

    def settle(self, step: int) -> None:
        """Records the steps since `since`."""
        steps = step - self.since
        if steps:
            self.made += self.rate * steps
            self.verifications += self.part * steps
            self.drafted += (self.cost - self.part) * steps
            self.tested += self.tests * steps
            self.since = step

    def pace(self, rate: float, cost: float, part: float = 1.0, tests: float = 0.0) -> None:
        """Sets the pace from step `since` on. The last step may overshoot; the excess is not counted."""
        self.rate, self.cost, self.part, self.tests = rate, cost, part, tests
        steps = (self.tokens - self.made) / rate
        self.end_step = self.since + max(1, -int(-(steps - ROUNDING) // 1))


ROUNDING = 1e-6
"""Number of steps: a smaller rest of a step comes from adding fractions."""
