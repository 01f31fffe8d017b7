"""The coordinator's side of the group context: past lengths in; ended samples, groups and rewards out.

Invariant: nothing here delays or fails a rollout. Questions have a deadline and otherwise no answer; what is told is
sent and not waited for, and counted. Called by the coordinator, on its event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable

from ray.actor import ActorHandle

from tailrace.deployments.context.archive import shard_of
from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.history import Answer, PastLength
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.errors import is_own_cancel

CALL_S = 10.0
"""Longest wait for an actor's answer; after it the actor counts as away."""


class ContextService:
    """`shards`: see ensure_context."""

    def __init__(self, shards: list[ActorHandle], config: ContextConfig):
        self._shards, self._config = shards, config
        self._counts: Counter[str] = Counter()
        self._told: set[asyncio.Task] = set()

    async def lengths(self, prompt_keys: Iterable[str]) -> dict[str, list[PastLength]]:
        """Past lengths of prompts that have any, newest epochs first; {} when the answer is late."""
        by_shard: dict[int, list[str]] = {}
        for key in dict.fromkeys(prompt_keys):
            by_shard.setdefault(shard_of(key, len(self._shards)), []).append(key)
        asked = [(self._shards[shard], keys) for shard, keys in by_shard.items()]
        answers = await self._ask_all(self._config.lengths_deadline_s, "lengths", asked)
        return {key: lengths for answer in answers for key, lengths in answer.items()}

    def finish(self, group: GroupRef, epoch: int, answers: list[Answer]) -> None:
        """These samples have ended, whole: for mates that still run, and for later epochs. Once is enough."""
        self._tell("finish", group.prompt_key, group, epoch, answers)

    def end(self, group: GroupRef) -> None:
        """The group is over: no sample of it runs any more."""
        self._tell("end", group.prompt_key, group)

    def reward(self, prompt_key: str, epoch: int, rewards: dict[int, float]) -> None:
        """Rewards of answers that have been finished before, by sample index."""
        self._tell("reward", prompt_key, prompt_key, epoch, rewards)

    async def forget_history(self) -> int:
        """Every answer of earlier epochs, on disk too; the number there were."""
        return sum(await self._ask_all(CALL_S, "forget_history", [(shard,) for shard in self._shards]))

    async def inspect(self, name: str) -> dict | None:
        """Contents of a group id, prompt id or prompt key, see ContextShard.inspect, or None if unknown."""
        known = await self._ask_all(CALL_S, "inspect", [(shard, name) for shard in self._shards])
        return max(known, key=lambda answer: len(answer["samples"]), default=None)

    def counts(self) -> dict[str, int]:
        """Calls by `METHOD`, and those that failed by `METHOD_failed.CAUSE`."""
        return dict(self._counts)

    def _tell(self, method: str, prompt_key: str, *arguments) -> None:
        call = getattr(self._shards[shard_of(prompt_key, len(self._shards))], method).remote(*arguments)
        task = asyncio.get_running_loop().create_task(self._within(CALL_S, method, _answer(call)))
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def _ask_all(self, seconds: float, method: str, asked: Iterable[tuple]) -> list:
        """The answers of shards, each given with its arguments, without those that are late, failed or None."""
        calls = (getattr(shard, method).remote(*arguments) for shard, *arguments in asked)
        answers = await asyncio.gather(*(self._within(seconds, method, _answer(call)) for call in calls))
        return [answer for answer in answers if answer is not None]

    async def _within(self, seconds: float, what: str, work: Awaitable):
        """The answer; None, counted by cause, when there is none in time."""
        self._counts[what] += 1
        try:
            return await asyncio.wait_for(work, seconds)
        except (Exception, asyncio.CancelledError) as error:  # nothing here may fail a rollout
            if isinstance(error, asyncio.CancelledError) and is_own_cancel():
                raise
            self._counts[f"{what}_failed.{type(error).__name__}"] += 1
            return None


async def _answer(call):
    return await call
