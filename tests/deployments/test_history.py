"""Laws of the history: it survives a restart, keeps its windows, and no file can keep the service from running."""

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.deployments.context import history as history_file
from tailrace.deployments.context.archive import Archive
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.history import Answer, History, PastLength, is_on_network, pack, prompt_key, unpack
from tailrace.deployments.context.live_groups import Packet
from tailrace.deployments.context.prompt_files import EVERY, FILES, file_of, shard_of, shards_files
from tailrace.deployments.context.shard import ContextShard
from tailrace.deployments.messages.context import GroupRef, Piece

PLENTY = 2**30


def answer(sample_index: int, length: int = 20, reward=None, finished: bool = True, seed: int = 0) -> Answer:
    tokens = np.random.default_rng([seed, sample_index]).integers(0, 50_000, length, np.int32)
    return Answer(sample_index, 7, reward, finished, tokens)


def opened(path, epochs: int = 4, most_bytes: float = PLENTY) -> History:
    return History(path, epochs, most_bytes)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_what_is_packed_comes_back(tokens):
    tokens = np.array(tokens, np.int32)
    back = unpack(pack(tokens))
    assert back.dtype == np.int32 and back.flags.writeable and back.tolist() == tokens.tolist()


def test_words_of_a_small_vocabulary_take_two_bytes_at_most():
    tokens = np.random.default_rng(0).integers(0, 2**16, 10_000, np.int32)
    assert len(pack(tokens)) < 2.01 * len(tokens)


def test_a_prompt_has_one_name_whatever_surrounds_it():
    assert prompt_key(" Why?\n") == prompt_key("Why?") != prompt_key("why?")
    assert len(prompt_key("")) == 32


def test_tokens_between_turns_are_kept_and_are_no_part_of_a_length():
    history = opened(None)
    history.record("k", "b/p", 3, [answer(0, 30)._replace(outside_tokens=12)])
    assert history.lengths("k") == [PastLength(3, 18, True)]
    assert len(history.answers("k", but_not_of="")[0].tokens) == 30


@pytest.mark.parametrize("killed", [False, True])
def test_a_restart_finds_what_was_recorded(tmp_path, killed):
    path = tmp_path / "deep" / "history.sqlite"
    history = opened(path)
    history.record("k", "b/p", 3, [answer(0), answer(1, 30, finished=False)])
    history.reward("k", 3, {0: 0.5})
    if not killed:
        history.close()
    again = opened(path)  # where the first one was not closed: as after a kill, its writes are in the WAL
    assert again.lengths("k") == [PastLength(3, 20, True), PastLength(3, 30, False)]
    found = again.answers("k", but_not_of="")
    assert [(a.epoch, a.weights_version, a.reward, len(a.tokens)) for a in found] == [(3, 7, 0.5, 20), (3, 7, None, 30)]
    assert found[0].tokens.tolist() == answer(0).tokens.tolist()
    assert again.nbytes == history.nbytes if killed else again.nbytes > 0
    assert again.problem == ""


def test_telling_twice_changes_nothing_and_a_reward_stays():
    history = opened(None)
    assert history.record("k", "b/p", 1, [answer(0), answer(1)]) == 2
    assert history.reward("k", 1, {0: 1.0, 5: 1.0}) == 1
    size = history.nbytes
    assert history.record("k", "b/p", 1, [answer(1), answer(0)]) == 0
    assert history.nbytes == size and [a.reward for a in history.answers("k", "")] == [1.0, None]
    assert history.record("k", "b/p", 1, [answer(0, finished=False)]) == 1
    assert [a.reward for a in history.answers("k", "")] == [1.0, None]
    assert history.record("k", "b/p", 1, [answer(0, seed=9)]) == 1, "another answer under its name takes its place"
    assert [a.reward for a in history.answers("k", "")] == [None, None], "and the old one's reward is not its own"


def test_newest_epochs_come_first_and_a_group_is_not_its_own_history():
    history = opened(None)
    for epoch in (2, 5, 3):
        history.record("k", f"batch-{epoch}/p", epoch, [answer(0, seed=epoch)])
    history.record("other", "batch-5/q", 5, [answer(0)])
    assert [a.epoch for a in history.answers("k", but_not_of="batch-5/p")] == [3, 2]
    assert [length.epoch for length in history.lengths("k")] == [5, 3, 2]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 2)), max_size=40))
@settings(max_examples=40)
def test_a_prompt_keeps_its_newest_epochs_and_bytes_are_counted(steps):
    history, told = opened(None, epochs=3), {"a": set(), "b": set()}
    for key, epoch, sample in steps:
        history.record(key, "b/p", epoch, [answer(sample, seed=epoch)])
        if epoch >= min(sorted(told[key], reverse=True)[:3], default=0) or len(told[key]) < 3:
            told[key].add(epoch)
        for each, epochs in told.items():
            kept = sorted(epochs, reverse=True)[:3]
            assert [view.epoch for view in history.epochs(each)] == kept
            told[each] = set(kept)
        assert history.nbytes == history.totals().packed_bytes


def test_a_prompt_that_is_asked_for_ever_in_one_epoch_keeps_its_newest_answers():
    """So are all requests over HTTP without a step; the answers to one are asked for at every further one."""
    history, most = opened(None), history_file.EPOCH_ANSWERS
    history.record("other", "b/p", 0, [answer(number) for number in range(most)])
    for number in range(most + 44):
        history.record("k", f"http/{number}", 0, [answer(10**6 - number, 20 + number)])
    history.record("k", "b/p", 1, [answer(0, 7)])
    lengths = sorted(one.length_tokens for one in history.lengths("k"))
    assert lengths == [7, *range(20 + 44, 20 + most + 44)] and len(history.lengths("other")) == most
    assert history.nbytes == history.totals().packed_bytes


class FullDisk:
    """The connection to a file on a disk that is full."""

    def __init__(self, base: sqlite3.Connection):
        self._base = base

    def __enter__(self):
        return self._base.__enter__()

    def __exit__(self, *error):
        return self._base.__exit__(*error)

    def execute(self, what: str, *arguments):
        if what == "VACUUM":
            raise sqlite3.OperationalError("database or disk is full")
        return self._base.execute(what, *arguments)


def test_answers_are_forgotten_and_counted_on_a_full_disk(tmp_path):
    """Room for a second copy of the file is what is missing then."""
    history = opened(tmp_path / "history.sqlite")
    for key in ("k", "other"):
        history.record(key, "b/p", 3, [answer(0), answer(1)])
    history._base = FullDisk(history._base)
    assert history.forget("k") == 2 and history.lengths("k") == [] and len(history.lengths("other")) == 2
    assert history.nbytes == history.totals().packed_bytes and history.forget() == 2 and history.nbytes == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), max_size=60))
@settings(max_examples=40)
def test_bytes_stay_within_their_bound_and_the_oldest_epochs_go_first(steps):
    history, kept = opened(None, epochs=100, most_bytes=1_000), set()
    for number, (epoch, length) in enumerate(steps):
        history.record("k", "b/p", epoch, [answer(number, length)])
        known, kept = kept | {epoch}, {view.epoch for view in history.epochs("k")}
        assert history.nbytes == history.totals().packed_bytes <= 1_000
        assert not kept or all(gone < min(kept) for gone in known - kept)


def test_rooms_are_made_by_age_over_all_prompts():
    history = opened(None, epochs=100, most_bytes=2_000)
    for number in range(40):
        history.record(f"prompt-{number % 7}", "b/p", number, [answer(0, 50)])
    epochs = sorted(view.epoch for number in range(7) for view in history.epochs(f"prompt-{number}"))
    assert epochs == list(range(40 - len(epochs), 40)) and len(epochs) > 10


def foreign(path):
    base = sqlite3.connect(path)
    base.executescript("CREATE TABLE answers (other TEXT); INSERT INTO answers VALUES ('mine');")
    base.close()


def broken(path):
    path.write_bytes(b"no database at all, but long enough to be read as one" * 100)


def torn(path):
    history = opened(path)
    history.record("k", "b/p", 1, [answer(0, 5_000)])
    history.close()
    data = bytearray(path.read_bytes())
    data[100 : 3 * 4096] = b"\xff" * (3 * 4096 - 100)
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [foreign, broken, torn])
def test_a_bad_file_is_one_line_stays_as_it_is_and_history_goes_on_in_memory(tmp_path, spoil):
    path = tmp_path / "history.sqlite"
    spoil(path)
    before = path.read_bytes()
    history = opened(path)
    assert history.problem.startswith(f"{path}: not usable as history") and "\n" not in history.problem
    history.record("k", "b/p", 1, [answer(0)])
    assert len(history.answers("k", "")) == 1
    history.close()
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    history = opened(tmp_path / "file" / "history.sqlite")
    assert "not usable" in history.problem and history.record("k", "b/p", 1, [answer(0)]) == 1


def test_a_prompt_is_found_by_each_of_its_names():
    history = opened(None)
    history.record("k1", "batch/a_b", 1, [answer(0)])
    history.record("k2", "batch/axb", 1, [answer(0)])
    for name in ("k1", "batch/a_b", "a_b"):
        assert history.find(name) == ("k1", "batch/a_b")
    assert history.find("b") is None and history.find("batch") is None


def test_forgetting_one_prompt_or_all():
    history = opened(None)
    for key in ("k1", "k2"):
        history.record(key, "b/p", 1, [answer(0), answer(1)])
    assert history.forget("k1") == 2 and history.totals()[:2] == (1, 2)
    assert history.forget() == 2 and history.nbytes == 0


def test_a_file_is_made_in_folders_that_are_not_there_and_is_its_owner_s_alone(tmp_path):
    path = tmp_path / "runs" / "history" / "0.sqlite"
    assert not opened(path).problem and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


# ---- all files, and the shard over them ----------------------------------------------------------------


@given(st.integers(1, FILES), st.text("a0_ /é\N{SNOWMAN}", min_size=1))
def test_every_file_has_one_shard_and_every_prompt_finds_its_own(shards, key):
    owners = [shard for shard in range(shards) for _ in shards_files(shard, shards)]
    assert len(owners) == FILES and file_of(key) in shards_files(shard_of(key, shards), shards)


def test_another_number_of_shards_finds_the_same_history(tmp_path):
    config = ContextConfig(history_dir=str(tmp_path))
    keys = [f"key-{number}" for number in range(40)]
    whole = Archive(config, EVERY)
    for key in keys:
        whole.of(key).record(key, f"batch/{key}", 1, [answer(0)])
    shards = [Archive(config, shards_files(shard, 3)) for shard in range(3)]
    assert all(shards[shard_of(key, 3)].of(key).lengths(key) for key in keys)
    assert whole.find("key-7") == ("key-7", "batch/key-7") and whole.nbytes > 0 and whole.problem == ""


def test_looking_makes_no_file(tmp_path):
    archive = Archive(ContextConfig(history_dir=str(tmp_path / "none")), EVERY)
    assert archive.find("x") is None and list(archive.files()) == [] and not (tmp_path / "none").exists()


GROUP = GroupRef("batch/p", prompt_key("hello"))


def test_a_shard_keeps_what_is_finished_over_a_restart(tmp_path):
    config = ContextConfig(history_dir=str(tmp_path))

    async def first():
        shard = ContextShard(config, 0)
        await shard.finish([(GROUP, 4, [answer(0), answer(1, 30, finished=False)])])
        await shard.finish([(GROUP, 4, [answer(0)])])
        await shard.reward(GROUP.prompt_key, 4, {1: 0.25})
        seen = await shard.inspect("p")
        late = asyncio.create_task(shard.end(GROUP))
        await asyncio.sleep(0)
        await shard.exchange("engine", Packet.of([Piece(GROUP, 2, 0, answer(2).tokens)]), [])
        await late
        return seen, await shard.inspect("p"), await shard.status()

    async def second():
        shard = ContextShard(config, 0)
        other = GROUP._replace(group_id="later/p")
        return await shard.past([other, GROUP]), await shard.lengths([GROUP.prompt_key, "none"])

    running, over, status = asyncio.run(first())
    assert [sample["finished"] for sample in running["samples"]] == [True, True] and over["samples"] == []
    assert running["history"] == over["history"] and over["history"][0]["mean_reward"] == 0.25
    assert (status["counts"]["recorded_answers"], status["counts"]["rewarded_answers"]) == (2, 1)
    (past, own), lengths = asyncio.run(second())
    assert [a.reward for a in past] == [None, 0.25] and own == []
    assert lengths == {GROUP.prompt_key: [PastLength(4, 20, True), PastLength(4, 30, False)]}


def test_a_history_that_breaks_under_way_is_counted_and_costs_nothing_else(tmp_path):
    async def work():
        shard = ContextShard(ContextConfig(history_dir=str(tmp_path)), 0)
        await shard.finish([(GROUP, 1, [answer(0)])])
        (path,) = (path for path in tmp_path.glob("*.sqlite"))
        base = sqlite3.connect(path)
        base.execute("DROP TABLE answers")
        base.commit()
        await shard.finish([(GROUP, 2, [answer(0)])])
        past, lengths = await shard.past([GROUP]), await shard.lengths([GROUP.prompt_key])
        return past, lengths, await shard.inspect("p"), await shard.status()

    past, lengths, seen, status = asyncio.run(work())
    assert (past, lengths) == ([[]], {}) and status["groups"] == 1
    assert status["counts"]["history_failures"] == 4 and status["problem"].startswith("history: ")
    assert seen["problem"] == status["problem"] and seen["samples"] and seen["history"] == []


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/export /shared nfs4 rw 0 0
/dev/sdb1 /shared/local\\040disk xfs rw 0 0
s3fs /mnt/bucket fuse.s3fs rw 0 0
"""


@pytest.mark.parametrize(("path", "network"), [
    ("/var/history.sqlite", False), ("/shared/tailrace/history.sqlite", True), ("/shared/local disk/x.sqlite", False),
    ("/mnt/bucket/x.sqlite", True), ("/sharedx/x.sqlite", False),
])  # fmt: skip
def test_network_file_systems_are_known(path, network):
    assert is_on_network(Path(path), MOUNTS) == network


@pytest.mark.parametrize(("network", "mode"), [(False, "wal"), (True, "delete")])
def test_no_shared_memory_is_used_on_a_network_file_system(tmp_path, monkeypatch, network, mode):
    monkeypatch.setattr(history_file, "is_on_network", lambda path: network)
    path = tmp_path / "private" / "history.sqlite"
    history = opened(path)
    history.record("k", "b/p", 3, [answer(0)])
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == (mode,)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    history.close()
    assert opened(path).lengths("k") == [PastLength(3, 20, True)]
