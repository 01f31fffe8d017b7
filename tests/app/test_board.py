"""`ReplicaTable` against books kept by adding up, and its own errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from performances import measured, performance

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.protocol.events import IllegalEvent, ReplicaJoined
from tailrace.policies.protocol.performance import MethodAcceptance

PROFILE = settings(max_examples=100, derandomize=True, deadline=None, database=None)
SMALL = st.integers(0, 5)
OPERATIONS = st.lists(st.tuples(st.sampled_from("jjrrrrelvw"), SMALL, SMALL, st.integers(1, 150)), max_size=60)


def join(replica_id: str, blocks=10, block_tokens=16, max_running=2, draft_tokens=0, version=0) -> ReplicaJoined:
    return ReplicaJoined(0.0, replica_id, block_tokens, blocks, max_running, draft_tokens, version)


class Books:
    """Every answer worked out anew from the list of chunks."""

    def __init__(self):
        self.version, self.joins, self.versions, self.chunks = 0, {}, {}, {}

    def room(self, replica_id: str) -> int:
        if replica_id not in self.joins or self.versions[replica_id] != self.version:
            return 0
        event, needs = self.joins[replica_id], [n for r, n in self.chunks.values() if r == replica_id]
        if len(needs) >= event.max_running:
            return 0
        used = sum(-(-(need + event.draft_tokens) // event.block_tokens) for need in needs)
        return max(0, (event.kv_capacity_blocks - used) * event.block_tokens - event.draft_tokens)

    def agree(self, board: ReplicaTable) -> None:
        ids = sorted(self.joins)
        rooms = {replica_id: self.room(replica_id) for replica_id in ids}
        assert {replica_id: board.room_tokens(replica_id) for replica_id in ids} == rooms
        best = min(rooms, key=lambda i: (-rooms[i], i), default=None)
        assert board.roomiest() == (best if best and rooms[best] else None)
        ready = [i for i in ids if self.versions[i] == self.version]
        assert board.ready() == ready and board.all_ready() == (bool(ids) and ready == ids)
        views = [view._asdict() for view in board.views()]
        assert [(v["replica_id"], v["weights_version"]) for v in views] == [(i, self.versions[i]) for i in ids]
        for view in views:
            running = [need for replica_id, need in self.chunks.values() if replica_id == view["replica_id"]]
            assert view["running"] == len(running) <= view["max_running"]
            assert 0 <= view["kv_free_tokens"] <= view["kv_capacity_tokens"] - sum(running)
        for need in (1, 40, 150):
            for after in (None, "r0", "r3", "r9"):
                behind = [i for i in ids if after is None or i > after] + [i for i in ids if after and i <= after]
                assert board.next_with_room(after, need) == next((i for i in behind if rooms[i] >= need), None)


@PROFILE
@given(operations=OPERATIONS)
def test_it_answers_like_books_kept_by_adding_up(operations):
    board, books = ReplicaTable(), Books()
    for number, (operation, which, other, need) in enumerate(operations):
        replica_id, known = f"r{which}", f"r{which}" in books.joins
        if operation == "j":
            block_tokens = (1, 16, 24)[other % 3]
            sizes = (3 * need // block_tokens, block_tokens, 1 + other, 2 * other)
            event = join(replica_id, *sizes, books.version + need % 4 // 3)
            board.join(event)
            books.joins.setdefault(replica_id, event)
            books.versions[replica_id] = event.weights_version
        elif operation == "r" and books.room(replica_id) >= need:
            board.reserve(replica_id, f"c{number}", need)
            books.chunks[f"c{number}"] = (replica_id, need)
        elif operation == "r" and known:
            with pytest.raises(ValueError, match="has not that room"):
                board.reserve(replica_id, "too much", need)
        elif operation == "e" and books.chunks:
            chunk_id = sorted(books.chunks)[which % len(books.chunks)]
            board.release(books.chunks.pop(chunk_id)[0], chunk_id)
        elif operation == "l" and known:
            gone = [chunk_id for chunk_id, (home, _) in books.chunks.items() if home == replica_id]
            assert board.leave(replica_id) == gone
            books.chunks = {c: kept for c, kept in books.chunks.items() if kept[0] != replica_id}
            del books.joins[replica_id], books.versions[replica_id]
        elif operation == "w":
            books.version += 1
            board.change_weights(books.version)
        assert (replica_id in board) == (replica_id in books.joins)
        books.agree(board)


def test_room_is_exact_to_the_token():
    """The drafts' look-ahead shares the chunk's last block, and a chunk of exactly the room fits."""
    board = ReplicaTable()
    board.join(join("r", blocks=2, draft_tokens=5))
    assert board.room_tokens("r") == board.capacity_tokens() == 27
    with pytest.raises(ValueError, match="needs 28 tokens"):
        board.reserve("r", "c", 28)
    board.reserve("r", "c", 27)
    assert (board.room_tokens("r"), board.roomiest()) == (0, None)
    board.release("r", "c")
    assert (board.room_tokens("r"), board.roomiest()) == (27, "r")


def test_other_weights_leave_no_room_until_the_replica_joins_with_them():
    board = ReplicaTable()
    board.join(join("a"))
    board.change_weights(1)
    assert (board.roomiest(), board.ready(), board.all_ready()) == (None, [], False)
    board.join(join("a", version=1))
    assert (board.roomiest(), board.all_ready()) == ("a", True)


def test_no_replicas_are_not_all_ready():
    assert not ReplicaTable().all_ready() and ReplicaTable().capacity_tokens() == 0


def test_performance_is_that_of_the_newest_report_and_go_with_the_replica():
    """Law 8: a report that comes late changes nothing."""
    board = ReplicaTable()
    board.join(join("r"))
    assert board.performance("r") is None
    for prefill, observed_at in ((10.0, 5.0), (20.0, 4.0), (30.0, 5.0)):
        board.measure(measured(9.0, "r", prefill, at=observed_at))
        assert board.performance("r") == performance(30.0 if prefill == 30.0 else 10.0, at=5.0)
    assert board.view("r").performance == board.performance("r")
    board.leave("r")
    with pytest.raises(IllegalEvent, match="not here"):
        board.measure(measured(9.0, "r"))
    board.join(join("r"))
    assert board.performance("r") is None


def test_nodes_are_counted_by_the_replicas_on_them():
    board = ReplicaTable()
    assert board.one_node
    for replica_id, node_id in (("a", "n1"), ("b", "n2"), ("c", "n2")):
        board.join(ReplicaJoined(0.0, replica_id, 16, 10, 2, 0, 0, node_id))
    assert not board.one_node and board.node("c") == "n2"
    board.leave("b")
    assert not board.one_node
    board.leave("c")
    assert board.one_node


def test_the_heap_of_rooms_stays_small():
    """Memory follows the replicas, not the chunks that came and went."""
    board = ReplicaTable()
    board.join(join("r", blocks=100))
    for number in range(2_000):
        board.reserve("r", f"c{number}", 16)
        board.release("r", f"c{number}")
    assert len(board._roomy) <= 80 and board.roomiest() == "r"


def test_nothing_remains_of_the_drafts_of_replicas_that_have_left():
    board = ReplicaTable()
    for replica_id, right, tested in (("a", 0.1, 0.1), ("b", 0.1, 0.2), ("c", 0.4, 0.4)):
        board.join(join(replica_id))
        board.measure(measured(0.0, replica_id, acceptance=(MethodAcceptance("group", right, tested),)))
    assert board.mean_chance() == pytest.approx(0.6 / 0.7)
    for replica_id in "abc":
        board.leave(replica_id)
    assert (board.mean_chance(), board.chance("group", 0.5)) == (0.0, 0.5)
