"""The coordinator's side of the group context: asks for past lengths; sends ended samples, groups and rewards.

Invariant: nothing here delays or fails a rollout. Requests have a deadline, and no answer after it. Messages are sent
without waiting, and counted. A call about a prompt that now has another shard is repeated there. Called by the
coordinator, on its event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from ray.exceptions import RayActorError

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.history import Answer, PastLength
from tailrace.deployments.context.membership import NoShard, Peers
from tailrace.deployments.context.shard_count import ShardCount
from tailrace.deployments.context.shard_set import Moved, ShardSet, shard_of
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.errors import is_own_cancel

CALL_S = 10.0
"""Maximum seconds to wait for an actor's answer; after that the actor counts as unreachable."""

RESIZE_S = 70.0
"""Maximum seconds to wait for a change of the number of shards, start of processes included."""

FOLLOW_S = 5.0
"""Seconds between two checks of the number of shards that the engines need."""

ASK_S = 30.0
"""Seconds between two calls to shard 0 while no more than the configured minimum is wanted."""


class ContextService:
    """`shards`: see ensure_context."""

    def __init__(self, shards: Peers, config: ContextConfig):
        self._shards, self._config = shards, config
        self._set = ShardSet(0, config.shards)
        self._resizing = asyncio.Lock()
        self._counts: Counter[str] = Counter()
        self._told: set[asyncio.Task] = set()

    async def lengths(self, prompt_keys: Iterable[str]) -> dict[str, list[PastLength]]:
        """Returns past lengths of prompts that have any, newest epochs first; {} when the answer is late."""
        parts = self._by_shard(dict.fromkeys(prompt_keys))
        asked = (
            self._within(self._config.lengths_deadline_s, "lengths", self._lengths(*part)) for part in parts.items()
        )
        return {key: lengths for answer in await asyncio.gather(*asked) for key, lengths in (answer or {}).items()}

    def finish(self, group: GroupRef, epoch: int, answers: list[Answer]) -> None:
        """Sends whole samples that have ended, for mates that still run and for later epochs. Once is enough."""
        self._tell("finish", group.prompt_key, group, epoch, answers)

    def end(self, group: GroupRef) -> None:
        """Records the end of a group: no sample of it runs any more."""
        self._tell("end", group.prompt_key, group)

    def reward(self, prompt_key: str, epoch: int, rewards: dict[int, float]) -> None:
        """Sends rewards, by sample index, of answers that were sent by `finish`."""
        self._tell("reward", prompt_key, prompt_key, epoch, rewards)

    async def forget_history(self) -> int:
        """Deletes every answer of earlier epochs, also on disk. Returns their number."""
        async with self._resizing:  # else a file under way would be missed
            known = await self._within(CALL_S, "learn", self._ask(0, "learn", self._set))
            self._set = max(self._set, known or self._set)
            await self._ask_all("learn", self._set)
            return sum(await self._ask_all("forget_history"))

    async def inspect(self, name: str) -> dict | None:
        """Returns the contents of a group id, prompt id or prompt key, see ContextShard.inspect, or None if unknown."""
        known = await self._ask_all("inspect", name)
        return max(known, key=lambda answer: len(answer["samples"]), default=None)

    def counts(self) -> dict[str, int]:
        """Number of calls by `METHOD`, and of failed ones by `METHOD_failed.CAUSE`; `shards`: the present number of
        shards.
        """
        return {**self._counts, "shards": self._set.shards}

    async def follow(self, busy_replicas: Callable[[], int]) -> None:
        """Keeps as many shards as the engines need. Never returns. `busy_replicas`: returns the number of replicas that
        run samples.
        """
        now, count, due_s = asyncio.get_running_loop().time, ShardCount(self._config), 0.0
        while True:
            wanted = count.next(busy_replicas(), now())
            if now() >= due_s or max(wanted, self._set.shards) > self._config.shards:
                async with self._resizing:
                    answer = await self._within(RESIZE_S, "resize", self._resize(wanted))
                due_s = now() + (0.0 if answer is None else ASK_S)
            await asyncio.sleep(FOLLOW_S)

    async def _resize(self, shards: int) -> ShardSet:
        self._set = max(self._set, await self._shards.at(0).resize.remote(shards, self._set))
        return self._set

    async def _lengths(self, index: int, prompt_keys: list[str]) -> dict[str, list[PastLength]]:
        answer = await self._ask(index, "lengths", prompt_keys)
        if not isinstance(answer, Moved):
            return answer
        parts = await asyncio.gather(*(self._lengths(*part) for part in self._by_shard(prompt_keys).items()))
        return {key: lengths for part in parts for key, lengths in part.items()}

    def _by_shard(self, prompt_keys: Iterable[str]) -> dict[int, list[str]]:
        by_shard: dict[int, list[str]] = {}
        for key in prompt_keys:
            by_shard.setdefault(shard_of(key, self._set.shards), []).append(key)
        return by_shard

    def _tell(self, method: str, prompt_key: str, *arguments) -> None:
        work = self._within(CALL_S, method, self._ask_owner(prompt_key, method, *arguments))
        task = asyncio.get_running_loop().create_task(work)
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def _ask_all(self, method: str, *arguments) -> list:
        """Returns the answers of all shards, without those that are late, failed or None."""
        asked = (self._within(CALL_S, method, self._ask(i, method, *arguments)) for i in range(self._set.shards))
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def _ask_owner(self, prompt_key: str, method: str, *arguments):
        """Returns the answer of the shard that owns the prompt, also after a change of the set."""
        while True:
            answer = await self._ask(shard_of(prompt_key, self._set.shards), method, *arguments)
            if not isinstance(answer, Moved):
                return answer
            self._counts["moved"] += 1

    async def _ask(self, index: int, method: str, *arguments):
        """Returns a shard's answer; Moved, once both sides know the newer set, or a while after the shard was gone."""
        try:
            answer = await _answer(getattr(self._shards.at(index), method).remote(*arguments))
        except (NoShard, RayActorError):
            if index == 0:
                raise
            self._shards.lose(index)
            await asyncio.sleep(self._config.retry_s)
            self._set = max(self._set, await _answer(self._shards.at(0).learn.remote(self._set)))
            return Moved(self._set)
        if isinstance(answer, Moved):
            self._set = max(self._set, answer.to)
            if answer.to < self._set:
                await _answer(self._shards.at(index).learn.remote(self._set))
        return answer

    async def _within(self, seconds: float, what: str, work: Awaitable):
        """Returns the answer, or None, counted by cause, if it does not come in time."""
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
