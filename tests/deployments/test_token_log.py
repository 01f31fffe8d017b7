"""Tokens of weights that are gone survive the loss of their coordinator; a faulty log costs tokens, never more."""

import asyncio
import os
from types import SimpleNamespace

import numpy as np
import pytest

from tailrace.deployments.batches import token_log
from tailrace.deployments.batches.adapter_book import AdapterBook
from tailrace.deployments.batches.deliveries import Delivery
from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.live_batches import LiveBatches
from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.batches.records import SampleRecord
from tailrace.deployments.batches.token_log import MAX_AGE_S, TokenLog, unlogged
from tailrace.deployments.coordinator.weights import Weights
from tailrace.deployments.messages.chunk import ChunkResult, EngineStats
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EmitGroup, EndSample, SampleEnd, StartChunk

DIGESTS = ("start", "one", "two")


class Words:
    """Prompts whose text is their token ids."""

    tokenizer_name, model = "", "words"

    def prepare(self, message):
        return [Prepared(group, group.token_ids, group.max_tokens, group.prompt_id) for group in message.groups]

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


async def at_once() -> None:
    """Nothing has to be written before weights change."""


def message(seed: int = 0, first_token: int = 1, prompts: int = 1, name: str = "p{}") -> RolloutBatch:
    groups = tuple(
        PromptGroup(prompt_id=name.format(number), token_ids=(first_token, 2), samples=3, max_tokens=8)
        for number in range(prompts)
    )
    return RolloutBatch(batch_id="b", groups=groups, seed=seed)


class Coordinator:
    """The parts of a coordinator that keep tokens. `folder`: of the log, which outlives it."""

    def __init__(self, folder, version: int = 0, in_thread=asyncio.to_thread, digest: str = "", heard: bool = True):
        self.log = TokenLog(folder, "app", in_thread)
        self.weights = Weights(SimpleNamespace(), before=at_once)
        self.batches = LiveBatches(
            Words(), None, Telemetry("test"), self.log, self.weights, AdapterBook(), "n", lambda: 0.0
        )
        self.core = RolloutCore(Policies(), version)
        if heard:
            self.hold(version, digest)

    def hold(self, version: int, digest: str = "") -> None:
        """Its only replica holds these weights."""
        kinds = dict.fromkeys(("block_tokens", "kv_capacity_blocks", "max_running", "max_model_len"), 16)
        digest = digest or DIGESTS[version]
        report = EngineStats(
            replica_id="r", weights_version=version, draft_tokens=0, observed_at=0.0, weights_digest=digest, **kinds
        )
        self.weights.observe([report])
        self.core.observe(ev.WeightsChanged(0.0, version))
        self.core.observe(ev.ReplicaJoined(0.0, "r", 16, 16, 16, 0, version))

    async def submit(self, batch: RolloutBatch) -> LiveBatch:
        self.delivery = Delivery(batch, "driver", 0.0)
        self.batch = await self.batches.prepare(batch, self.delivery)
        self.core.observe(ev.SamplesSubmitted(0.0, self.batch.core_id, self.batch.specs))
        self.batches.add(self.batch)
        return self.batch

    def turn(self) -> list:
        self.actions = self.core.decide(ev.Tick(0.0))
        return self.actions

    def make(self, *lengths: int, stop: int | None = None) -> None:
        """One chunk of each sample with these numbers of tokens; the sample of index `stop` ends with it."""
        starts = [action for action in self.turn() if isinstance(action, StartChunk)]
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            end = ev.ChunkEnd.STOP if index == stop else ev.ChunkEnd.ABORTED
            part = chunk(100 * self.weights.version + 10 * index, length, self.weights.version, end)
            self.batch.samples[start.sample_id].append(start.start, part, "r", self.weights.digest)
            self.core.observe(ev.ChunkFinished(0.0, start.chunk_id, length, end, self.weights.version))

    async def update(self, version: int) -> None:
        """Weights change; the log is written first."""
        self.weights.version, self.weights.digests[version] = version, DIGESTS[version]
        await self.log.write(unlogged(self.batches.groups(), version), version)
        self.hold(version)


def chunk(first: int, length: int, version: int, end: ev.ChunkEnd) -> ChunkResult:
    token_ids = np.arange(first, first + length, dtype=np.int32)
    return ChunkResult(
        chunk_id="c", token_ids=token_ids, logprobs=-token_ids.astype(np.float32) / 7,
        raw_logprobs=-token_ids.astype(np.float32) / 3, end=end, weights_version=version,
        queue_s=0.0, prefill_s=0.0, decode_s=0.0, cached_tokens=0, computed_tokens=3,
    )  # fmt: skip


def contents(samples: list[SampleRecord]) -> list[tuple]:
    """All of the samples that a driver gets, and that can be kept."""
    names = ("token_ids", "logprobs", "raw_logprobs")
    return [
        (*(tuple(n for part in one.parts for n in getattr(part, name).tolist()) for name in names), tuple(one.segments))
        for one in samples
    ]


def samples_of(batch: LiveBatch) -> list[SampleRecord]:
    return [sample for group in batch.groups.values() for sample in group.samples]


async def lost(folder, prompts: int = 1, name: str = "p{}") -> list[tuple]:
    """A coordinator that is lost after an update in mid-batch. Returns the contents of its samples."""
    one = Coordinator(folder)
    await one.submit(message(prompts=prompts, name=name))
    one.make(*(3, 5, 2) * prompts, stop=1)
    await one.update(1)
    assert one.log.problems == {}
    return contents(samples_of(one.batch))


def test_tokens_of_older_weights_survive_their_coordinator(tmp_path):
    async def story():
        before = await lost(tmp_path)
        assert before[0][0] == (0, 1, 2) and before[1][3][0].weights_digest == "start"
        two = Coordinator(tmp_path, version=1)
        batch = await two.submit(message())
        assert contents(samples_of(batch)) == before
        assert batch.specs[0].begun == (ev.Begun(0, 3, False, 0), ev.Begun(1, 5, True, 0), ev.Begun(2, 2, False, 0))
        ended, *starts = two.turn()
        assert isinstance(ended, EndSample) and (ended.sample_id[-1], ended.end) == ("1", SampleEnd.STOP)
        assert [(start.sample_id[-1], start.start, start.max_tokens) for start in starts] == [("0", 3, 5), ("2", 2, 6)]
        assert two.log.problems == {}

    asyncio.run(story())


@pytest.mark.parametrize("name", ["p#{}", "50%{}", "a/{}~#25%25"])
def test_tokens_of_a_prompt_survive_whatever_its_id(tmp_path, name):
    async def story():
        before = await lost(tmp_path, prompts=2, name=name)
        batch = await Coordinator(tmp_path, version=1).submit(message(prompts=2, name=name))
        assert contents(samples_of(batch)) == before

    asyncio.run(story())


def test_tokens_of_two_updates_survive_two_coordinators(tmp_path):
    async def story():
        await lost(tmp_path)
        two = Coordinator(tmp_path, version=1)
        await two.submit(message())
        two.make(1, 4)
        await two.update(2)
        before = contents(samples_of(two.batch))
        three = Coordinator(tmp_path, version=2)
        assert contents(samples_of(await three.submit(message()))) == before
        assert [(one.weights_version, one.start, one.end) for one in before[0][3]] == [(0, 0, 3), (1, 3, 4)]

    asyncio.run(story())


def test_tokens_that_can_be_made_again_are_not_written(tmp_path):
    async def story():
        one = Coordinator(tmp_path)
        await one.submit(message())
        one.make(3, 5, 2)
        await one.log.write(unlogged(one.batches.groups(), 0), 0)
        assert list(tmp_path.iterdir()) == []

    asyncio.run(story())


def test_an_old_chunk_that_comes_late_is_appended(tmp_path):
    async def story():
        one = Coordinator(tmp_path)
        batch = await one.submit(message())
        one.make(3, 5, 2)
        one.weights.version, one.weights.digests[1] = 1, "one"
        await one.log.write(unlogged(one.batches.groups(), 1), 1)
        (size,) = (path.stat().st_size for path in tmp_path.iterdir())
        one.log.reopen()
        assert not one.log.is_complete(1)
        samples_of(batch)[2].append(2, chunk(50, 4, 0, ev.ChunkEnd.STOP), "late", "start")
        await one.log.write(unlogged(one.batches.groups(), 1), 1)
        (grown,) = (path.stat().st_size for path in tmp_path.iterdir())
        assert 0 < grown - size < size and one.log.is_complete(1)
        again = await Coordinator(tmp_path, version=1).submit(message())
        assert contents(samples_of(again)) == contents(samples_of(batch))
        assert again.specs[0].begun[2] == ev.Begun(2, 6, True, 0)

    asyncio.run(story())


def test_a_finished_group_that_no_driver_has_acknowledged_survives(tmp_path):
    async def story():
        one = Coordinator(tmp_path)
        batch = await one.submit(message())
        one.make(8, 8, 3, stop=2)
        for action in one.turn():
            one.batches.emit(action) if isinstance(action, EmitGroup) else one.batches.end(action, version=0)
        assert batch.over and one.batches.groups() == []
        (group,) = one.delivery.unread()
        await one.log.write(unlogged([group], 1), 1)
        two = Coordinator(tmp_path, version=1)
        again = await two.submit(message())
        assert contents(samples_of(again)) == contents(group.samples)
        ends = [SampleEnd.LENGTH, SampleEnd.LENGTH, SampleEnd.STOP]
        *ended, emitted = two.turn()
        assert [action.end for action in ended] == ends and isinstance(emitted, EmitGroup)
        item, record = await one.delivery.next(0, 1)
        one.delivery.give(item, record)
        assert one.delivery.unread() == [group]
        one.delivery.acknowledge(1)
        assert one.delivery.unread() == []

    asyncio.run(story())


def test_a_coordinator_that_has_heard_no_replica_yet_waits_for_its_weights(tmp_path):
    async def story():
        one = Coordinator(tmp_path, version=1)
        await one.submit(message())
        one.make(4, 4, 4)
        await one.log.write(unlogged(one.batches.groups(), 2), 2)
        two = Coordinator(tmp_path, heard=False)
        submitted = asyncio.ensure_future(two.submit(message()))
        await asyncio.sleep(0.2)
        assert not submitted.done()
        two.weights.observe([])
        two.hold(2)
        again = await submitted
        assert contents(samples_of(again)) == contents(samples_of(one.batch))
        assert not two.log.problems

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_damaged_log_gives_a_part_of_the_tokens_and_never_others(tmp_path, prompts):
    """A flipped bit or a cut, anywhere: samples have all their logged tokens or none of them."""

    async def story():
        before = await lost(tmp_path, prompts)
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        flipped = [(place, bytes([whole[place] ^ 1 << place % 8])) for place in range(0, len(whole), 5)]
        cuts = [(place, b"") for place in range(0, len(whole), 11)]
        for place, byte in flipped + cuts:
            path.write_bytes(whole[:place] + byte + whole[place + 1 :] if byte else whole[:place])
            two = Coordinator(tmp_path, version=1)
            found = contents(samples_of(await two.submit(message(prompts=prompts))))
            assert all(one in (other, ((), (), (), ())) for one, other in zip(found, before, strict=True))
            if two.log.problems != {"token_log.damaged": 1}:  # a cut between two records is none
                assert not byte and found[-1][0] == () and any(one[0] for one in found)
            two.turn()

    asyncio.run(story())


@pytest.mark.parametrize("other", [message(seed=1), message(first_token=9)])
def test_another_batch_of_the_same_id_gets_nothing(tmp_path, other):
    async def story():
        await lost(tmp_path)
        two = Coordinator(tmp_path, version=1)
        batch = await two.submit(other)
        assert {sample.tokens for sample in samples_of(batch)} == {0}
        assert two.log.problems == {"token_log.other_batch": 1}

    asyncio.run(story())


@pytest.mark.parametrize(("version", "digest"), [(0, "start of another run"), (1, "one")])
def test_tokens_of_weights_that_never_came_before_are_not_taken(tmp_path, version, digest):
    """A run that began anew: its version 0 is another one, or it has passed another version 0."""

    async def story():
        await lost(tmp_path)
        two = Coordinator(tmp_path, version=version, digest=digest)
        two.weights.digests[0] = "start of another run"
        batch = await two.submit(message())
        assert {sample.tokens for sample in samples_of(batch)} == {0}
        assert two.log.problems == {"token_log.other_weights": 1}

    asyncio.run(story())


def test_a_service_that_went_back_takes_the_tokens_up_to_its_weights(tmp_path):
    async def story():
        await lost(tmp_path)
        two = Coordinator(tmp_path, version=1)
        await two.submit(message())
        two.make(1, 4)
        await two.update(2)
        three = Coordinator(tmp_path)
        assert [sample.tokens for sample in samples_of(await three.submit(message()))] == [3, 5, 2]

    asyncio.run(story())


class FullDisk:
    """`os.write` that takes `left` bytes more, or any number if None."""

    def __init__(self, monkeypatch):
        self.left: int | None = None
        self._write = os.write
        monkeypatch.setattr(token_log.os, "write", self)

    def __call__(self, file, data):
        if self.left is None:
            return self._write(file, data)
        if not self.left:
            raise OSError(28, "No space left on device")
        written = self._write(file, data[: self.left])
        self.left -= written
        return written


@pytest.mark.parametrize("room", [0, 30, 90])
def test_a_full_disk_ends_nothing_and_the_next_write_makes_up_for_it(tmp_path, monkeypatch, room):
    async def story():
        disk = FullDisk(monkeypatch)
        one = Coordinator(tmp_path / "log")
        batch = await one.submit(message())
        one.make(3, 5, 2)
        disk.left = room
        await one.update(1)
        assert one.log.problems == {"token_log.OSError": 1} and one.log.is_complete(1)
        assert list((tmp_path / "log").iterdir()) == []
        disk.left = None
        one.make(1, 1, 1)
        await one.update(2)
        disk.left = room
        samples_of(batch)[0].append(4, chunk(50, 4, 1, ev.ChunkEnd.ABORTED), "late", "one")
        await one.log.write(unlogged(one.batches.groups(), 2), 2)
        disk.left = None
        samples_of(batch)[1].append(6, chunk(50, 1, 1, ev.ChunkEnd.ABORTED), "late", "one")
        await one.log.write(unlogged(one.batches.groups(), 2), 2)
        two = Coordinator(tmp_path / "log", version=2)
        assert contents(samples_of(await two.submit(message()))) == contents(samples_of(batch))
        assert two.log.problems == {} and one.log.problems == {"token_log.OSError": 2}

    asyncio.run(story())


def test_a_folder_that_cannot_be_made_is_counted(tmp_path):
    async def story():
        (tmp_path / "file").touch()
        one = Coordinator(tmp_path / "file" / "log")
        await one.submit(message())
        one.make(3, 5, 2)
        await one.update(1)
        assert sum(one.log.problems.values()) >= 1 and one.log.is_complete(1)

    asyncio.run(story())


def test_a_folder_that_hangs_is_waited_for_once(tmp_path, monkeypatch):
    async def story():
        calls, answer = [], asyncio.Event()

        async def in_thread(work, *args):
            calls.append(work)
            await answer.wait()
            return work(*args)

        monkeypatch.setattr(token_log, "TURN_S", 0.01)
        one = Coordinator(tmp_path)
        await one.submit(message())
        one.make(3, 5, 2)
        one.log._in_thread = in_thread
        await one.update(1)
        await one.update(2)
        assert len(calls) == 1 and one.log.problems == {"token_log.TimeoutError": 2} and one.log.is_complete(2)
        answer.set()
        await one.log._late
        await one.log.write(unlogged(one.batches.groups(), 2), 2)
        two = Coordinator(tmp_path, version=2)
        assert contents(samples_of(await two.submit(message()))) == contents(samples_of(one.batch))

    asyncio.run(story())


def test_files_are_for_their_owner_alone(tmp_path):
    async def story():
        await lost(tmp_path / "a" / "log")
        folder = tmp_path / "a" / "log"
        (path,) = folder.iterdir()
        assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
        target = path.rename(tmp_path / "elsewhere")
        path.symlink_to(target)
        two = Coordinator(folder, version=1)
        assert {sample.tokens for sample in samples_of(await two.submit(message()))} == {0}
        assert two.log.problems == {"token_log.OSError": 1}

    asyncio.run(story())


def test_a_batch_that_is_over_leaves_no_file(tmp_path):
    async def story():
        one = Coordinator(tmp_path)
        await one.submit(message())
        one.make(3, 5, 2)
        await one.update(1)
        await one.log.forget("b")
        assert list(tmp_path.iterdir()) == []
        late, forgotten = one.log.write(unlogged(one.batches.groups(), 9), 9), one.log.forget("b")
        await asyncio.gather(forgotten, late)  # tokens that were gathered while the batch was still there
        assert list(tmp_path.iterdir()) == [] and one.log.problems == {}

    asyncio.run(story())


def test_a_file_that_nobody_comes_back_for_is_deleted_after_a_day(tmp_path):
    async def story():
        await lost(tmp_path)
        (path,) = tmp_path.iterdir()
        (tmp_path / "of another application").touch()
        for age_s, left in ((MAX_AGE_S - 60, 2), (MAX_AGE_S + 60, 1)):
            for each in tmp_path.iterdir():
                os.utime(each, (path.stat().st_mtime - age_s,) * 2)
            await Coordinator(tmp_path, version=1).log.write({}, 1)
            assert len(list(tmp_path.iterdir())) == left

    asyncio.run(story())


def test_a_file_that_is_in_use_stays_however_old_it_is(tmp_path):
    async def story():
        one = Coordinator(tmp_path)
        await one.submit(message())
        one.make(3, 5, 2)
        await one.update(1)
        (path,) = tmp_path.iterdir()
        os.utime(path, (path.stat().st_mtime - MAX_AGE_S - 60,) * 2)
        await one.log.write({}, 1)
        assert list(tmp_path.iterdir()) == [path]

    asyncio.run(story())


def test_a_coordinator_that_was_cut_off_does_not_write_into_the_file_of_the_next(tmp_path):
    async def story():
        one = Coordinator(tmp_path)
        await one.submit(message())
        one.make(3, 5, 2)
        await one.update(1)
        two = Coordinator(tmp_path, version=1)
        await two.submit(message())
        two.make(1, 1, 1)
        await two.update(2)
        one.make(5, 3, 6)
        await one.update(2)
        three = Coordinator(tmp_path, version=2)
        assert contents(samples_of(await three.submit(message()))) == contents(samples_of(two.batch))

    asyncio.run(story())


def test_a_log_that_is_off_holds_nothing_up(tmp_path):
    async def story():
        one = Coordinator(None)
        assert one.log.is_complete(7) and not one.log.is_on
        await one.submit(message())
        one.make(3, 5, 2)
        await one.update(1)
        await one.log.forget("b")
        assert one.log.problems == {} and {sample.logged for sample in samples_of(one.batch)} == {0}

    asyncio.run(story())
