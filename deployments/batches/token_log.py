"""Tokens that cannot be made again, on disk: tokens of earlier weights, of batches in flight.

Invariant: before a replica drops the weights of a sample's tokens, these tokens are on disk in the file of their batch,
and the next coordinator begins the sample with them. Tokens of the present weights are not there: they can be made
again. Reading a file stops at a damaged record, and the tokens after it are made again. No method raises for a fault of
the disk or of the content: the fault is counted in `problems`, and the service continues as without a log. Called by
`Rollouts` and `LiveBatches`.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import numpy as np

from tailrace.deployments.batches.records import GroupRecord, SampleRecord
from tailrace.deployments.messages.chunk import ChunkResult, sample_key
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.logged_tokens import MAGIC, LoggedTokens, group_digest, packed, read_records
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, Segment
from tailrace.policies.protocol.events import ChunkEnd

MAX_AGE_S = 24 * 3600.0
"""Maximum age, in seconds since the last write, of a file: the driver of its batch has not returned. Older files are
deleted.
"""

TURN_S = 10.0
"""Maximum seconds that the coordinator's loop, on which all batches depend, waits for a few tokens to reach the
disk.
"""

BULK_S = 600.0
"""Maximum seconds that an update, or a new batch, waits for gigabytes: as long as for a load of weights."""


class Unlogged(NamedTuple):
    """Tokens of a sample from `sample.logged` to `end` that are to be written, and the sample's state at that time."""

    sample: SampleRecord
    parts: tuple[ChunkResult, ...]
    segments: tuple[Segment, ...]
    end: int


def unlogged(groups: Collection[GroupRecord], version: float) -> dict[str, list[Unlogged]]:
    """Returns, by batch id, the tokens of weights below `version` that are not in the log."""
    found: dict[str, list[Unlogged]] = {}
    for sample in (sample for group in groups for sample in group.samples):
        end = max((one.end for one in sample.segments if one.weights_version < version), default=0)
        if end > sample.logged:
            some = Unlogged(sample, tuple(sample.parts), tuple(sample.segments), end)
            found.setdefault(sample.group.batch_id, []).append(some)
    return found


def records_of(some: Unlogged) -> Iterator[bytes]:
    """Yields one packed record for each segment of the unlogged tokens."""
    group, sample = some.sample.group, some.sample
    group.log_name = group.log_name or group_digest(group.group, group.samples[0].key)
    columns = [
        np.concatenate([getattr(part, name) for part in some.parts]).astype(dtype)
        for name, dtype in (("token_ids", "<i4"), ("logprobs", "<f4"), ("raw_logprobs", "<f4"))
    ]
    for segment in some.segments:
        start, end = max(segment.start, sample.logged), min(segment.end, some.end)
        if start < end:
            stopped = end == some.segments[-1].end and some.parts[-1].end is ChunkEnd.STOP
            place, cut = segment.model_copy(update={"start": start, "end": end}), (one[start:end] for one in columns)
            yield packed(LoggedTokens(group.log_name, sample.index, place, stopped, *cut))


class BatchFile:
    """The file of one batch, owned by this coordinator: its first write replaces an older file with the same name.

    A coordinator that was cut off, but lives, therefore never writes into the file of the next one. Raises OSError.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._part = path, path.with_name(f"{path.name}.{token_hex(4)}")
        self._size = 0  # bytes that are certainly on disk
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def is_named(self) -> bool:
        """True once something has been written, so that the next coordinator finds the file."""
        return self._size > 0

    def append(self, records: Iterable[bytes]) -> None:
        """Writes records and flushes them to disk, all or none: a full disk leaves no partial records."""
        os.ftruncate(self._file, self._size)
        os.lseek(self._file, self._size, os.SEEK_SET)
        size = self._size + sum(map(self._put, chain((MAGIC,) if not self._size else (), records)))
        os.fsync(self._file)
        if not self._size:
            os.replace(self._part, self._path)
            flush_folder(self._path.parent)
        self._size = size

    def _put(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        return len(data)

    def close(self) -> None:
        os.close(self._file)
        self._part.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Flushes a folder: a new name is on disk only once its folder is. Some network file systems cannot flush one, and
    need not.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)


class TokenLog:
    """`folder`: None for no log. `app_name`: distinguishes applications that share a folder. `in_thread`: runs blocking
    work.

    `problems`: number of faults by kind.
    """

    def __init__(self, folder: Path | None, app_name: str, in_thread: Callable[..., Awaitable] = asyncio.to_thread):
        self._folder, self._in_thread = folder, in_thread
        self._prefix = blake2b(app_name.encode(), digest_size=4).hexdigest()
        self.problems: Counter[str] = Counter()
        self._files: dict[str, BatchFile] = {}  # by batch id; the thread's, as is each `SampleRecord.logged`
        self._over: set[str] = set()  # batches whose files are to be deleted
        self._lock = asyncio.Lock()
        self._late: asyncio.Task | None = None  # work that has missed its deadline
        self._complete_under: int | None = None

    # ---- whether all is written ----------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    def is_complete(self, version: int) -> bool:
        """True once all tokens of older weights are on disk, or writing them was given up."""
        return not self.is_on or self._complete_under == version

    def reopen(self) -> None:
        """Records that tokens of older weights have arrived."""
        self._complete_under = None

    # ---- called on the event loop ----------------------------------------------------------------------

    async def write(self, batches: Mapping[str, list[Unlogged]], version: int) -> None:
        """Writes tokens. The log then has all tokens of weights below `version`."""
        await self._within(TURN_S, self._write, batches)
        self._complete_under = version

    async def write_early(self, batches: Mapping[str, list[Unlogged]]) -> None:
        """Writes tokens before it is urgent, so that `write` has little to do."""
        await self._within(BULK_S, self._write, batches)

    async def read(self, batch: RolloutBatch, groups: Collection[PromptGroup]) -> list[tuple[str, LoggedTokens]]:
        """Returns the tokens of a batch in order, with their prompt ids. `groups`: all groups of the batch."""
        return await self._within(BULK_S, self._read, batch, groups) or []

    async def has_batches(self) -> bool:
        """Returns whether an earlier coordinator has left tokens here, of batches that may come back."""
        return bool(await self._within(TURN_S, lambda: any(self._folder.glob(f"{self._prefix}-*"))))

    async def forget(self, batch_id: str) -> None:
        """Deletes the file of a batch that is over, before any other work."""
        self._over.add(batch_id)
        await self._within(BULK_S, self._sweep)

    def note(self, kind: str, text: str) -> None:
        """Counts a fault, and logs it."""
        self.problems[f"token_log.{kind}"] += 1
        logging.getLogger(__name__).warning("contained in token_log: %s", text)

    async def _within(self, deadline_s: float, work: Callable, *args):
        """Returns the result of `work`, or None if it failed or takes too long.

        A folder may hang for ever: after a timeout no further work starts until the first answers.
        """
        if not self.is_on:
            return None
        if self._late is not None and not self._late.done():
            return self.note("TimeoutError", f"{self._folder}: still no answer")
        task = asyncio.get_running_loop().create_task(self._alone(work, *args))
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
        if done:
            return task.result()
        self._late = task
        return self.note("TimeoutError", f"{self._folder}: no answer in {deadline_s:.0f} s")

    async def _alone(self, work: Callable, *args):
        async with self._lock:
            try:
                return await self._in_thread(work, *args)
            except Exception as error:  # noqa: BLE001 - a disk error, or a defect: the log must not end the service
                return self.note(type(error).__name__, one_line(error))

    # ---- on the thread ---------------------------------------------------------------------------------

    def _write(self, batches: Mapping[str, list[Unlogged]]) -> None:
        over = self._sweep()
        for batch_id in batches.keys() - over:
            try:
                self._append(batch_id, batches[batch_id])
            except OSError as error:  # the disk is full, or the folder not ours
                self.note(type(error).__name__, one_line(error))

    def _append(self, batch_id: str, samples: list[Unlogged]) -> None:
        file = self._files.pop(batch_id, None) or BatchFile(self._path(batch_id))
        try:
            file.append(chain.from_iterable(map(records_of, samples)))
        finally:
            if file.is_named:
                self._files[batch_id] = file
            else:
                file.close()
        for some in samples:
            some.sample.logged = max(some.sample.logged, some.end)

    def _read(self, batch: RolloutBatch, groups: Collection[PromptGroup]) -> list[tuple[str, LoggedTokens]]:
        self._sweep()
        found, strange, names = [], 0, {}
        try:
            with open(self._path(batch.batch_id), "rb", opener=_no_link) as file:
                for group in groups:
                    key = sample_key(batch.seed, batch.step, group.prompt_id, 0)
                    names[group_digest(group, key)] = group.prompt_id
                for tokens in read_records(file):
                    if tokens.group in names:
                        found.append((names[tokens.group], tokens))
                    else:
                        strange += 1
        except FileNotFoundError:
            return []
        except ValueError as error:
            self.note("damaged", f"batch {batch.batch_id!r}: {error}")
        if strange:
            self.note("other_batch", f"batch {batch.batch_id!r}: {strange} records are of other prompts or settings")
        return found

    def _sweep(self) -> set[str]:
        """Deletes files of batches that are over, and old files. Returns the batches that are over."""
        over = set()
        while self._over:
            over.add(batch_id := self._over.pop())
            if (file := self._files.pop(batch_id, None)) is not None:
                file.close()
            self._path(batch_id).unlink(missing_ok=True)
        kept = {self._path(batch_id) for batch_id in self._files}
        for path in self._folder.glob(f"{self._prefix}-*"):
            with contextlib.suppress(FileNotFoundError):
                if path not in kept and path.stat().st_mtime < time.time() - MAX_AGE_S:
                    path.unlink()
        return over

    def _path(self, batch_id: str) -> Path:
        return self._folder / f"{self._prefix}-{blake2b(batch_id.encode(), digest_size=16).hexdigest()}"


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
