"""Laws of the live logs: any interleaving is one path, cursors lose and repeat nothing, memory is bounded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.deployments.context.group_log import NOWHERE, Cursor
from tailrace.deployments.context.live_groups import COORDINATOR, LiveGroups, Packet, Want
from tailrace.deployments.messages.context import GroupRef, Piece

WRITERS = ("a", "b", "c")
GROUP = GroupRef("batch/p", "key")
PLENTY = 2**30


def answer(sample_index: int) -> np.ndarray:
    """The tokens of a sample: what every writer of it writes."""
    return np.random.default_rng(sample_index).integers(0, 50_000, 64, np.int32)


def piece(sample_index: int, start: int, end: int, group: GroupRef = GROUP) -> Piece:
    return Piece(group, sample_index, start, answer(sample_index)[start:end])


def of_groups(ttl_s: float = 100.0, most_bytes: float = PLENTY, first_era: int = 1) -> LiveGroups:
    return LiveGroups(ttl_s, most_bytes, first_era)


class Reader:
    """What one reader knows, and how often it was told."""

    def __init__(self, groups: LiveGroups, name: str, group: GroupRef = GROUP):
        self.groups, self.name, self.group, self.cursor = groups, name, group, NOWHERE
        self.told: dict[tuple[int, int], list[int]] = {}

    def read(self, now_s: float = 0.0) -> list[Piece]:
        packet, (self.cursor,) = self.groups.fetch(self.name, [Want(self.group, self.cursor)], now_s)
        pieces = list(packet.pieces())
        for each in pieces:
            for offset, token in enumerate(each.tokens.tolist()):
                self.told.setdefault((each.sample_index, each.start + offset), []).append(token)
        return pieces


writers, samples, starts, counts = st.sampled_from(WRITERS), st.integers(0, 2), st.integers(0, 60), st.integers(0, 20)
appends = st.lists(st.tuples(writers, samples, starts, counts, st.none() | writers), max_size=40)
"""(writer, sample, start, tokens, who looks afterwards)"""


@pytest.mark.slow
@given(appends)
def test_any_interleaving_is_one_path_and_readers_miss_and_repeat_nothing(steps):
    groups = of_groups()
    readers = {name: Reader(groups, name) for name in (*WRITERS, "late")}
    written: dict[tuple[int, int], str] = {}  # position -> who wrote it first
    own: dict[str, set] = {name: set() for name in WRITERS}
    looked = set()
    for writer, sample, start, count, looks in steps:
        end = min(64, start + count)
        groups.append(writer, Packet.of([piece(sample, start, end)]), 0.0)
        for position in range(start, end):
            if written.setdefault((sample, position), writer) == writer and writer in looked:
                own[writer].add((sample, position))
        if looks:
            readers[looks].read()
            looked.add(looks)
    for name, reader in readers.items():
        reader.read()
        for (sample, position), tokens in reader.told.items():
            assert tokens == [answer(sample)[position]], "told once, and rightly"
        assert set(reader.told) | own.get(name, set()) == set(written), "nothing is missing"


@pytest.mark.slow
@given(appends)
def test_what_a_writer_wrote_while_it_read_does_not_come_back(steps):
    groups = of_groups()
    groups.append("other", Packet.of([piece(9, 0, 1)]), 0.0)
    reader = Reader(groups, "a")
    reader.read()
    first: dict[tuple[int, int], str] = {}
    for writer, sample, start, count, _ in steps:
        end = min(64, start + count)
        groups.append(writer, Packet.of([piece(sample, start, end)]), 0.0)
        for position in range(start, end):
            first.setdefault((sample, position), writer)
    reader.read()
    assert set(reader.told) - {(9, 0)} == {place for place, writer in first.items() if writer != "a"}


def test_pieces_of_a_sample_come_joined_and_a_gap_stays_one():
    groups = of_groups()
    for start, end in ((0, 5), (5, 9), (20, 30), (30, 31)):
        groups.append("a", Packet.of([piece(0, start, end)]), 0.0)
    groups.append("b", Packet.of([piece(1, 31, 34)]), 0.0)
    found = Reader(groups, "c").read()
    assert [(p.sample_index, p.start, len(p.tokens)) for p in found] == [(0, 0, 9), (0, 20, 11), (1, 31, 3)]
    groups.append("b", Packet.of([piece(0, 4, 25)]), 0.0)
    again = Reader(groups, "d").read()
    assert [(p.start, p.tokens.tolist()) for p in again if p.sample_index == 0] == [(0, answer(0)[:31].tolist())]


def test_groups_read_at_once_stay_apart():
    groups, other = of_groups(), GroupRef("other", "k")
    groups.append("a", Packet.of([piece(0, 0, 5), piece(0, 5, 9, other), piece(1, 0, 2, other)]), 0.0)
    packet, _ = groups.fetch("b", [Want(other, NOWHERE), Want(GROUP, NOWHERE)], 0.0)
    found = [(p.group, p.sample_index, p.start, p.tokens.tolist()) for p in packet.pieces()]
    assert found == [
        (other, 0, 5, answer(0)[5:9].tolist()),
        (other, 1, 0, answer(1)[:2].tolist()),
        (GROUP, 0, 0, answer(0)[:5].tolist()),
    ]


def test_what_is_read_is_the_readers_own():
    groups = of_groups()
    groups.append("a", Packet.of([piece(0, 0, 5)]), 0.0)
    (first,) = Reader(groups, "b").read()
    first.tokens[:] = 0
    (second,) = Reader(groups, "c").read()
    assert second.tokens.tolist() == answer(0)[:5].tolist() and second.tokens.dtype == np.int32


def test_a_read_only_packet_yields_tokens_that_can_be_written_to():
    packet = Packet.of([piece(0, 0, 5)])
    packet.tokens.flags.writeable = False
    assert all(each.tokens.flags.writeable for each in packet.pieces())


def test_a_cursor_of_another_life_reads_from_the_start():
    old, new = of_groups(first_era=1), of_groups(first_era=10)
    old.append("a", Packet.of([piece(0, 0, 40)]), 0.0)
    reader = Reader(old, "b")
    reader.read()
    new.append("a", Packet.of([piece(0, 40, 50)]), 0.0)
    reader.groups, reader.told = new, {}
    assert [(p.start, len(p.tokens)) for p in reader.read()] == [(40, 10)]
    assert reader.read() == []


def test_a_group_nobody_touches_is_forgotten_and_reading_is_touching():
    groups = of_groups(ttl_s=10.0)
    for name in ("read", "left"):
        groups.append("a", Packet.of([piece(0, 0, 5, GroupRef(name, "k"))]), 0.0)
    Reader(groups, "b", GroupRef("read", "k")).read(now_s=8.0)
    groups.sweep(12.0)
    assert groups.find("left") is None and groups.find("read") is not None
    groups.sweep(17.9)
    assert groups.find("read") is not None, "its time has not passed"
    groups.sweep(20.0)
    assert len(groups) == groups.nbytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 50)), max_size=60))
def test_memory_stays_within_its_bound_and_the_longest_untouched_goes_first(steps):
    groups = of_groups(most_bytes=2_000)
    touched: dict[str, int] = {}
    for now_s, (number, sample, start) in enumerate(steps):
        group = GroupRef(f"g{number}", "k")
        groups.append("a", Packet.of([piece(sample, start, start + 10, group)]), float(now_s))
        touched[group.group_id] = now_s
        assert groups.nbytes <= 2_000
        assert groups.nbytes == sum(groups.find(name)[1].nbytes for name in touched if groups.find(name))
        kept = [at for name, at in touched.items() if groups.find(name)]
        lost = [at for name, at in touched.items() if not groups.find(name)]
        assert not kept or not lost or max(lost) < min(kept)


def test_a_forgotten_group_that_comes_back_is_read_from_its_start():
    groups = of_groups()
    reader = Reader(groups, "b")
    groups.append("a", Packet.of([piece(0, 0, 5)]), 0.0)
    reader.read()
    groups.forget(GROUP)
    assert reader.read() == []
    for start in range(5, 15):
        groups.append("a", Packet.of([piece(0, start, start + 1)]), 0.0)
    assert [(p.start, len(p.tokens)) for p in reader.read()] == [(5, 10)]


def test_finished_and_running_samples_are_told_apart():
    groups = of_groups()
    groups.append("a", Packet.of([piece(0, 0, 5), piece(1, 0, 7)]), 0.0)
    groups.append(COORDINATOR, Packet.of([piece(0, 0, 6)]), 0.0)
    groups.finish(GROUP, {0: 6}, 0.0)
    for name in (GROUP.group_id, GROUP.prompt_key, "p"):
        group, log = groups.find(name)
        assert group == GROUP and log.reach() == {0: 6, 1: 7} and log.finished == {0: 6}
    assert groups.find("q") is None
    assert Reader(groups, "a").read(), "a first look gives the reader's own too: it may have given up its index"


def test_an_unknown_group_is_no_error_and_who_waits_for_it_does_not_hear_itself():
    groups = of_groups()
    _, (cursor,) = groups.fetch("a", [Want(GROUP, Cursor(7, 9))], 0.0)
    groups.append("a", Packet.of([piece(0, 0, 5)]), 0.0)
    groups.append("b", Packet.of([piece(1, 0, 5)]), 0.0)
    news, _ = groups.fetch("a", [Want(GROUP, cursor)], 0.0)
    assert [each.sample_index for each in news.pieces()] == [1]
