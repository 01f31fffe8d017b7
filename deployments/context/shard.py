"""One shard of the group context: the groups in flight of its prompts, and their history on disk.

Invariant: `exchange`, called by engines while they decode, never waits for the disk, which has its own thread. A
history that fails costs drafts, is counted and reported in `status`, and is never an error of a caller. Every operation
may be repeated. Knows no Ray: deployments/context/actors.py makes it an actor.
"""

import asyncio
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from tailrace.deployments.context.archive import Archive
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.group_log import Cursor
from tailrace.deployments.context.history import Answer, PastLength
from tailrace.deployments.context.live_groups import COORDINATOR, LiveGroups, Packet, Want
from tailrace.deployments.context.prompt_files import shards_files
from tailrace.deployments.messages.context import GroupRef, PastAnswer, Piece

T = TypeVar("T")


class ContextShard:
    """`index`: index of this shard. Must be created where an event loop runs."""

    def __init__(self, config: ContextConfig, index: int):
        self._now = asyncio.get_running_loop().time
        self._live = LiveGroups(config.ttl_s, config.live_mib * 2**20, first_era=time.time_ns())
        self._archive = Archive(config, shards_files(index, config.shards))
        self._disk = ThreadPoolExecutor(1, f"history-{index}")
        self._late_s = 2 * (config.linger_s + config.flush_s)
        self._counts: Counter[str] = Counter()
        self._problem = ""

    async def exchange(self, writer: str, packet: Packet, wants: list[Want]) -> tuple[Packet, list[Cursor]]:
        """Returns the tokens of others since the cursors, for the groups that an engine runs, and takes its samples'
        tokens.

        It does so in this order, so that a first call, which returns all tokens, does not return those that it brings.
        """
        now_s = self._now()
        news, cursors = self._live.fetch(writer, wants, now_s)
        self._live.append(writer, packet, now_s)
        self._counts["appended_tokens"] += len(packet.tokens)
        self._counts["fetched_tokens"] += len(news.tokens)
        return news, cursors

    async def past(self, groups: list[GroupRef]) -> list[list[PastAnswer]]:
        """Returns each group's history, newest epochs first, without the answers of this group itself."""
        return await self._on_disk(partial(self._past, groups), [[] for _ in groups])

    async def finish(self, ended: list[tuple[GroupRef, int, list[Answer]]]) -> None:
        """Records samples that have ended, by group and epoch: mates get them whole, later epochs find them."""
        now_s = self._now()
        for group, _, answers in ended:
            pieces = [Piece(group, answer.sample_index, 0, answer.tokens) for answer in answers]
            self._live.append(COORDINATOR, Packet.of(pieces), now_s)
            self._live.finish(group, {answer.sample_index: len(answer.tokens) for answer in answers}, now_s)
        record = partial(self._record, ended)
        self._counts["recorded_answers"] += await self._on_disk(record, 0)

    async def end(self, group: GroupRef) -> None:
        """Drops a group without running samples; tokens that engines still send for it are dropped with it."""
        await asyncio.sleep(self._late_s)
        self._live.forget(group)

    async def reward(self, prompt_key: str, epoch: int, rewards: dict[int, float]) -> None:
        """Records rewards of recorded answers, by sample index; other rewards are ignored."""
        tell = partial(self._tell, prompt_key, epoch, rewards)
        self._counts["rewarded_answers"] += await self._on_disk(tell, 0)

    async def forget_history(self) -> int:
        """Deletes every answer of earlier epochs that this shard keeps, also on disk. Returns their number."""
        return await self._on_disk(lambda: sum(file.forget() for file in self._archive.files()), 0)

    async def lengths(self, prompt_keys: list[str]) -> dict[str, list[PastLength]]:
        """Returns past lengths of each prompt, newest epochs first; prompts without any are left out."""
        found = await self._on_disk(partial(self._lengths, prompt_keys), {})
        return {key: lengths for key, lengths in found.items() if lengths}

    async def inspect(self, name: str) -> dict | None:
        """Returns samples and history of a group id, prompt id or prompt key as plain data, or None if unknown."""
        live = self._live.find(name)
        past = await self._on_disk(partial(self._archive.find, name), None) if live is None else None
        if live is None and past is None:
            return None
        group = live[0] if live else GroupRef(past[1], past[0])
        log = live[1] if live else None
        samples = [
            {"sample_index": index, "tokens": tokens, "finished": index in log.finished}
            for index, tokens in (sorted(log.reach().items()) if log else ())
        ]
        epochs = await self._on_disk(lambda: self._archive.of(group.prompt_key).epochs(group.prompt_key), [])
        past_epochs = [epoch._asdict() for epoch in epochs]
        return group._asdict() | {"samples": samples, "history": past_epochs, "problem": self._problem}

    async def status(self) -> dict:
        """Returns groups and bytes held, processor time used, counts, and the error if history does not work."""
        self._live.sweep(self._now())
        return {
            "pid": os.getpid(),
            "groups": len(self._live),
            "live_bytes": self._live.nbytes,
            "cpu_s": time.process_time(),
            "history_bytes": self._archive.nbytes,
            "problem": self._problem,
            "counts": dict(self._counts),
        }

    # ---- on the disk's thread ------------------------------------------------------------------------

    async def _on_disk(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return await self._in_thread(work)
        except sqlite3.Error as error:
            self._counts["history_failures"] += 1
            self._note(f"history: {error}")
            return otherwise
        finally:
            self._note(self._archive.problem)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _note(self, problem: str) -> None:
        """Logs a problem once, in one line."""
        if problem and problem != self._problem:
            logging.getLogger(__name__).warning(problem)
            self._problem = problem

    def _past(self, groups: list[GroupRef]) -> list[list[PastAnswer]]:
        return [self._archive.of(key).answers(key, but_not_of=group_id) for group_id, key in groups]

    def _record(self, ended: list[tuple[GroupRef, int, list[Answer]]]) -> int:
        return sum(
            self._archive.of(group.prompt_key).record(group.prompt_key, group.group_id, epoch, answers)
            for group, epoch, answers in ended
        )

    def _tell(self, prompt_key: str, epoch: int, rewards: dict[int, float]) -> int:
        return self._archive.of(prompt_key).reward(prompt_key, epoch, rewards)

    def _lengths(self, prompt_keys: list[str]) -> dict[str, list[PastLength]]:
        return {key: self._archive.of(key).lengths(key) for key in prompt_keys}
