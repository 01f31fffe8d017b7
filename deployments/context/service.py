"""The coordinator's side of the group context: asks for past lengths; sends ended samples, groups and rewards.

Invariant: nothing here delays or fails a rollout. Requests have a deadline, and no answer after it. Messages are sent
without waiting, and counted. A call to a shard that is being started is repeated until its deadline. Called by the
coordinator, on its event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable
from functools import partial

from ray.exceptions import RayActorError

from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.history import Answer, PastLength
from tailrace.deployments.context.joined_calls import JoinedCalls
from tailrace.deployments.context.prompt_files import shard_of
from tailrace.deployments.context.shard_handles import NoShard, ShardHandles
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.errors import is_own_cancel

CALL_S = 10.0
"""Maximum seconds to wait for an actor's answer; after that the actor counts as unreachable."""


class ContextService:
    """`shards`: see ensure_context."""

    def __init__(self, shards: ShardHandles, config: ContextConfig):
        self._shards, self._config = shards, config
        self._counts: Counter[str] = Counter()
        self._told: set[asyncio.Task] = set()
        self._lengths = [JoinedCalls(partial(self._ask_lengths, index)) for index in range(config.shards)]
        self._ended = [JoinedCalls(partial(self._send_ended, index)) for index in range(config.shards)]

    async def lengths(self, prompt_keys: Iterable[str]) -> dict[str, list[PastLength]]:
        """Returns past lengths of prompts that have any, newest epochs first; {} when the answer is late."""
        parts = self._by_shard(dict.fromkeys(prompt_keys))
        asked = (
            self._within(self._config.lengths_deadline_s, "lengths", asyncio.shield(self._lengths[index].add(keys)))
            for index, keys in parts.items()
        )
        found = {key: lengths for answer in await asyncio.gather(*asked) for key, lengths in (answer or {}).items()}
        return {key: found[key] for keys in parts.values() for key in keys if key in found}

    def finish(self, group: GroupRef, epoch: int, answers: list[Answer]) -> None:
        """Sends whole samples that have ended, for mates that still run and for later epochs. Once is enough."""
        self._ended[shard_of(group.prompt_key, self._config.shards)].add([(group, epoch, answers)])

    def end(self, group: GroupRef) -> None:
        """Records the end of a group: no sample of it runs any more."""
        asked = self._ask(shard_of(group.prompt_key, self._config.shards), "end", group)
        self._begin(self._within(CALL_S, "end", asked))

    def reward(self, prompt_key: str, epoch: int, rewards: dict[int, float]) -> None:
        """Sends rewards, by sample index, of answers that were sent by `finish`."""
        work = self._reward(shard_of(prompt_key, self._config.shards), prompt_key, epoch, rewards)
        self._begin(self._within(CALL_S, "reward", work))

    async def forget_history(self) -> int:
        """Deletes every answer of earlier epochs, also on disk. Returns their number."""
        return sum(await self._ask_all("forget_history"))

    async def inspect(self, name: str) -> dict | None:
        """Returns the contents of a group id, prompt id or prompt key, see ContextShard.inspect, or None if unknown."""
        known = await self._ask_all("inspect", name)
        return max(known, key=lambda answer: len(answer["samples"]), default=None)

    def counts(self) -> dict[str, int]:
        """Number of calls by `METHOD`, and of failed ones by `METHOD_failed.CAUSE`; `shards`: the number of shards."""
        return {**self._counts, "shards": self._config.shards}

    def _by_shard(self, prompt_keys: Iterable[str]) -> dict[int, list[str]]:
        by_shard: dict[int, list[str]] = {}
        for key in prompt_keys:
            by_shard.setdefault(shard_of(key, self._config.shards), []).append(key)
        return by_shard

    def _begin(self, work: Coroutine) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def _ask_lengths(self, index: int, keys: list[str]) -> dict[str, list[PastLength]]:
        asked = self._ask(index, "lengths", list(dict.fromkeys(keys)))
        return await asyncio.wait_for(asked, self._config.lengths_deadline_s)

    async def _send_ended(self, index: int, ended: list[tuple[GroupRef, int, list[Answer]]]) -> None:
        await self._within(CALL_S, "finish", self._ask(index, "finish", ended))

    async def _reward(self, index: int, *arguments) -> None:
        if sending := list(self._ended[index].tasks):
            await asyncio.wait(sending)  # a reward of an unknown answer is ignored
        await self._ask(index, "reward", *arguments)

    async def _ask_all(self, method: str, *arguments) -> list:
        """Returns the answers of all shards, without those that are late, failed or None."""
        asked = (self._within(CALL_S, method, self._ask(i, method, *arguments)) for i in range(self._config.shards))
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    async def _ask(self, index: int, method: str, *arguments):
        """Returns a shard's answer; asks again after a pause while there is no such shard."""
        while True:
            try:
                return await _answer(getattr(self._shards.at(index), method).remote(*arguments))
            except (NoShard, RayActorError):
                self._shards.lose(index)
                await asyncio.sleep(self._config.retry_s)

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
