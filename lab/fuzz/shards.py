"""The shards of a simulated cluster's group context: real shards, in simulated processes that die and are started
again.

Invariant: an answer that a shard has acknowledged is in the history of the shard that has its prompt. History in memory
is excepted once a process has died. Checked at the end of a run.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.history import Answer, unpack
from tailrace.deployments.context.prompt_files import shard_of
from tailrace.deployments.context.shard import ContextShard
from tailrace.deployments.context.shard_handles import NoShard
from tailrace.deployments.messages.context import GroupRef
from tailrace.lab.fuzz.actors import Actor
from tailrace.lab.fuzz.chunks import reward_of
from tailrace.lab.fuzz.handles import ActorHandle
from tailrace.lab.fuzz.virtual_time import Process

RESTART_S = (0.5, 5.0)

REWARDED = "SELECT prompt_key, epoch, sample_index, reward, tokens FROM answers WHERE reward IS NOT NULL"


def config_of(rng: Random, folder: Path | None) -> ContextConfig:
    """Returns a configuration with some shards. History is on disk for one run in four."""
    history_dir = str(folder) if rng.random() < 0.25 and folder else None
    return ContextConfig(shards=rng.choice((1, 2, 3)), history_dir=history_dir)


class SimulatedShard(Actor):
    """A ContextShard whose calls meet the fault of the moment. `recorded`: called with each answer that was taken."""

    def __init__(self, config: ContextConfig, index: int, recorded: Callable):
        super().__init__()
        self.real, self._recorded = ContextShard(config, index), recorded

    def __getattr__(self, name: str) -> Callable:
        async def method(*arguments):
            await self._meet()
            return await getattr(self.real, name)(*arguments)

        return method

    async def finish(self, ended: list[tuple[GroupRef, int, list[Answer]]]):
        await self._meet()
        await self.real.finish(ended)
        for one in ended:
            self._recorded(*one)


class SimulatedShards:
    """The shards by index, as Ray keeps them; `spawn`: starts a task that outlives them."""

    def __init__(self, config: ContextConfig, rng: Random, spawn: Callable):
        self.config, self._rng, self._spawn = config, rng, spawn
        self.shards: dict[int, SimulatedShard] = {}
        self._processes: dict[int, Process] = {}
        self._answers: dict[tuple[str, int], set[int]] = {}  # acknowledged, by prompt and epoch
        self.rewarded: dict[tuple[str, int], set[int]] = {}  # likewise, of those whose rewards must be there
        self._lost = False
        for index in range(config.shards):
            self.start(index)

    def at(self, index: int) -> ActorHandle:
        if index not in self.shards:
            raise NoShard(str(index))
        return ActorHandle(self._processes[index], self.shards[index], Random(self._rng.random()))

    def start(self, index: int) -> None:
        if index not in self.shards:
            process = self._processes[index] = Process(f"shard-{index}")
            self.shards[index] = process.run(SimulatedShard, self.config, index, self._record)

    def lose(self, index: int) -> None:
        """Does nothing: each call gets the present process here."""

    def kill(self, number: int) -> None:
        """Kills a process, which is started again with an empty memory."""
        index = sorted(self.shards)[number % len(self.shards)]
        self._lost = True
        self._processes[index].kill()
        self._spawn(self._restart(index, self._processes[index]))

    async def _restart(self, index: int, dead: Process) -> None:
        await asyncio.sleep(self._rng.uniform(*RESTART_S))
        if self._processes.get(index) is dead:
            del self.shards[index]
            self.start(index)

    def _record(self, group: GroupRef, epoch: int, answers: list[Answer]) -> None:
        known = self._answers.setdefault((group.prompt_key, epoch), set())
        known.update(answer.sample_index for answer in answers)

    async def left_over(self) -> str | None:
        """Returns which history is lost, or has wrong rewards, or None."""
        if (wrong := self._wrong_rewards()) is not None:
            return wrong
        if self._lost and self.config.history_dir is None:
            return None
        for (prompt_key, epoch), samples in self._answers.items():
            owner = self.shards[shard_of(prompt_key, self.config.shards)]
            lengths = (await owner.real.lengths([prompt_key])).get(prompt_key, [])
            if Counter(length.epoch for length in lengths)[epoch] < len(samples):
                return f"history of {prompt_key}, epoch {epoch} is lost: {len(samples)} answers were acknowledged"
        return None

    def _wrong_rewards(self) -> str | None:
        """Returns an answer in the history with the reward of another one, or without the one that it must have, or
        None."""
        missing = {place: set(samples) for place, samples in self.rewarded.items()}
        for file in (file for shard in self.shards.values() for file in shard.real._archive.files()):
            for key, epoch, index, reward, packed in file._base.execute(REWARDED):
                if reward != reward_of(unpack(packed)):
                    return f"history of {key}, epoch {epoch}: the reward of sample {index} is of other tokens"
                missing.get((key, epoch), set()).discard(index)
        lost = next(((place, samples) for place, samples in missing.items() if samples), None)
        return None if lost is None else f"rewards of {lost} have not come to the history"
