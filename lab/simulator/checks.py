"""Laws of a simulated run, checked from the core's events and actions alone: conservation, no preemption, time.

A race is decided here again: its winner is the first chunk to end, or an original that is aborted; the others are
beaten. Invariant: it reads no state of the core, of the host or of a replica. Called by `Host` if a run is to be
checked.
"""

from tailrace.lab.simulator.types import Workload
from tailrace.policies.protocol.actions import EndSample, SampleEnd, StartChunk
from tailrace.policies.protocol.events import (
    ChunkEnd,
    ChunkFinished,
    Event,
    ReplicaJoined,
    SampleReturned,
    SamplesSubmitted,
)


class LawBroken(AssertionError):
    """The simulation, or the core, is wrong."""


class Checks:
    """`reserves`: whether the core's reservations are to stay within the KV capacity (law 5). `overlaps`: a step may
    begin before the last one has ended.
    """

    def __init__(self, reserves: bool, overlaps: bool = False):
        self._reserves, self._overlaps = reserves, overlaps
        self._left: dict[str, int] = {}  # tokens that each sample still has to make
        self._prompts: dict[str, int] = {}
        self._joined: dict[str, ReplicaJoined] = {}
        self._blocks: dict[str, int] = {}
        self._made: dict[str, int] = {}
        self._running: dict[str, tuple[StartChunk, int]] = {}
        self._races: dict[str, set[str]] = {}  # by sample, its chunks that are not beaten
        self._now = 0.0

    def submit(self, lengths: dict[str, int]) -> None:
        """Takes the true lengths, by id, of the samples of the step that begins."""
        left = self._left.keys() & lengths.keys() if self._overlaps else self._left
        self._demand(not left, f"{len(left)} samples of the last step have not ended")
        self._left |= lengths
        self._made |= dict.fromkeys(lengths, 0)

    def turn(self, sample_id: str, length: int) -> None:
        """Records that a later turn, of this true length, comes as a request of its own."""
        self._left[sample_id], self._made[sample_id] = length, 0

    def event(self, event: Event) -> None:
        self._demand(event.now >= self._now, f"{event} after {self._now}")
        self._now = event.now
        match event:
            case ReplicaJoined():
                self._joined[event.replica_id] = event
                self._blocks.setdefault(event.replica_id, 0)
            case SamplesSubmitted():
                self._prompts |= {
                    f"{spec.group_id}#{i}": spec.prompt_tokens for spec in event.groups for i in range(spec.samples)
                }
            case SampleReturned():
                self._prompts[event.sample_id] += event.outside_tokens
            case ChunkFinished():
                self._finished(event)

    def _finished(self, event: ChunkFinished) -> None:
        start, blocks = self._running.pop(event.chunk_id)
        self._blocks[start.replica_id] -= blocks
        race = self._races.get(start.sample_id, set())
        if event.chunk_id not in race:
            return
        race.remove(event.chunk_id)
        if start.copy_of is None or event.end is not ChunkEnd.ABORTED:
            del self._races[start.sample_id]
            self._left[start.sample_id] -= event.new_tokens
            self._made[start.sample_id] += event.new_tokens

    def action(self, action) -> None:
        match action:
            case StartChunk():
                race = self._races.setdefault(action.sample_id, set())
                self._demand((action.copy_of in race) if race else action.copy_of is None, f"{action}: not its turn")
                self._demand(action.start == self._made[action.sample_id], f"{action}: begins at a wrong token")
                race.add(action.chunk_id)
                join = self._joined[action.replica_id]
                tokens = self._prompts[action.sample_id] + action.start + action.max_tokens + join.draft_tokens
                blocks = -(-tokens // join.block_tokens)
                self._running[action.chunk_id] = (action, blocks)
                self._blocks[action.replica_id] += blocks
                full = self._blocks[action.replica_id] > join.kv_capacity_blocks
                self._demand(not (full and self._reserves), f"{action}: more KV reserved than there is")
            case EndSample():
                self._demand(action.end in (SampleEnd.STOP, SampleEnd.LENGTH), f"{action.sample_id}: {action.error}")
                left = self._left.pop(action.sample_id, None)
                self._demand(left == 0, f"{action.sample_id} has ended with {left} tokens left to make")

    def end(self, preemptions: int) -> None:
        """Records that the run is over, with this number of preempted chunks."""
        self._demand(not self._left and not self._running, f"{len(self._left)} samples have not ended")
        self._demand(not (preemptions and self._reserves), f"{preemptions} preemptions despite reservations")

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            raise LawBroken(what)


def check_step(workload: Workload, step: int, room: int) -> None:
    """Raises ValueError if a step cannot be run: lengths beyond their bounds, or more context than `room`, the KV of a
    replica in tokens.
    """
    groups, most = workload.steps[step], workload.max_tokens
    lengths = [length for group in groups for length in group.lengths]
    if not 1 <= min(lengths) <= max(lengths) <= most:
        raise ValueError(f"{workload.name}, step {step}: lengths must be 1 to {most} tokens")
    longest = max(group.prompt_tokens + group.outside_tokens for group in groups) + most
    if longest > room:
        raise ValueError(f"{workload.name}: {longest} tokens of context; a replica has KV for {room}")
