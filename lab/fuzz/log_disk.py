"""The folder of the token log: its delays and faults, and the tokens that a lost coordinator had in it.

Invariant: while the folder is sound, a sample that a coordinator had continued under newer weights keeps its older
tokens, whatever happens to coordinators. The exception is a coordinator that begins while no engine holds weights as
new as theirs. `SimulatedCluster` records the tokens, and drivers check their results.
"""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from tailrace.deployments.batches.records import GroupRecord
from tailrace.deployments.messages.rollout import SampleResult, Segment
from tailrace.lab.fuzz.virtual_time import caller_is_dead

KINDS = ("sound", "sound", "sound", "full", "damaged", "off")
DELAY_S = 0.3


class LogDisk:
    """The folder of a run. `kind`: one of KINDS. `folder`: a real folder, or None if `kind` is off."""

    def __init__(self, kind: str, folder: Path, rng: Random):
        self.kind, self._rng = kind, rng
        self.folder = None if kind == "off" else folder
        self._older: dict[tuple[str, str, int], tuple[list[Segment], list[int]]] = {}

    async def in_thread(self, work: Callable, *args):
        """Runs `work`, as asyncio.to_thread, on the virtual clock."""
        await asyncio.sleep(self._rng.random() ** 3 * DELAY_S)
        if caller_is_dead():
            raise asyncio.CancelledError
        if self.kind == "full" and self._rng.random() < 0.5:
            raise OSError(28, "No space left on device")
        return work(*args)

    def damage(self) -> None:
        """Flips a bit of some files, or cuts them, if the folder is damaged."""
        for path in filter(Path.is_file, sorted(self.folder.iterdir())) if self.kind == "damaged" else ():
            data = bytearray(path.read_bytes())
            place = self._rng.randrange(len(data) + 1)
            if place < len(data) and self._rng.random() < 0.5:
                data[place] ^= 1 << self._rng.randrange(8)
            else:
                del data[place:]
            path.write_bytes(data)

    def lose(self, groups: Iterable[GroupRecord], version: int) -> None:
        """Records the tokens of weights below `version`, as their coordinator is lost."""
        for sample in (sample for group in groups for sample in group.samples if self.kind == "sound"):
            old = [segment for segment in sample.segments if segment.weights_version < version]
            if old:
                tokens = sample.context()[len(sample.group.prompt) :][: old[-1].end].tolist()
                self._older[sample.group.batch_id, sample.group.group.prompt_id, sample.index] = old, tokens

    def begin_under(self, version: int) -> None:
        """Records that a coordinator begins while no engine holds weights above `version`: tokens of later weights are
        made again."""
        for name, (segments, tokens) in list(self._older.items()):
            self._older[name] = [one for one in segments if one.weights_version <= version], tokens

    def begin(self, batch_id: str) -> None:
        """Records that a driver opens the batch, and has none of its tokens."""
        self._older = {name: old for name, old in self._older.items() if name[0] != batch_id}

    def problem(self, batch_id: str, prompt_id: str, sample: SampleResult) -> str | None:
        """Returns how a result differs from the tokens that were lost with a coordinator, or None."""
        segments, tokens = self._older.pop((batch_id, prompt_id, sample.sample_index), ((), []))
        for segment in segments:
            now = next((one for one in sample.segments if one.start <= segment.start < one.end), None)
            if now is not None and now.weights_version < segment.weights_version:
                return None  # the service was lost with all replicas, and began with older weights
            span = slice(segment.start, segment.end)
            if list(sample.token_ids[span]) != tokens[span]:
                return f"tokens {segment.start} to {segment.end} of weights {segment.weights_version} were not kept"
        return None
