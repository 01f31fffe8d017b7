"""Records: addressed by position, last write wins, rows are used again without a trace."""

import numpy as np
import pytest

from tailrace.deployments.vllm_exact.logprob_store import DrawRecord, LogprobStore


def write(records, req_id, positions, value, drafted=0, accepted=0):
    positions = np.asarray(positions, np.int64)
    slots = records.slots([req_id], positions[:1]).repeat(len(positions))
    records.write(slots, positions, np.float32(value), np.float32(value) - 1, np.float32(0.5), drafted, accepted)


def test_a_token_drawn_again_replaces_what_was_recorded():
    records = LogprobStore()
    write(records, "a", [5, 6, 7], -1.0, drafted=[4, 0, 0], accepted=[1, 1, 0])
    write(records, "a", [6], -2.0)
    logprobs, raw_logprobs, _, drafted, accepted, *_ = records.take("a", 5, 3)
    assert logprobs.tolist() == [-1.0, -2.0, -1.0]
    assert raw_logprobs.tolist() == [-2.0, -3.0, -2.0]
    assert (drafted, accepted) == (4, 1)


def test_tokens_cut_behind_a_stop_are_not_counted():
    records = LogprobStore()
    write(records, "a", [5, 6, 7], -1.0, drafted=[2, 0, 0], accepted=[1, 1, 0])
    write(records, "a", [8, 9], -1.0, drafted=[3, 0], accepted=[1, 0])
    logprobs, _, _, drafted, accepted, *_ = records.take("a", 5, 2)
    assert len(logprobs) == 2
    assert (drafted, accepted) == (2, 2)


def test_requests_beyond_the_first_rows_and_tokens_keep_their_entries():
    records = LogprobStore(requests=1, tokens=2)
    names = [f"r{i}" for i in range(9)]
    for position in range(40):
        slots = records.slots(names, np.arange(9) + 100)
        records.write(slots, np.arange(9) + 100 + position, np.arange(9) - 10.0, -position, 0.5, 1, 0)
    for i, name in enumerate(names):
        logprobs, raw_logprobs, _, drafted, accepted, *_ = records.take(name, 100 + i, 40)
        assert set(logprobs) == {i - 10.0}
        assert raw_logprobs.tolist() == [-p for p in range(40)]
        assert (drafted, accepted) == (40, 0)
    assert len(records) == 0


def test_a_row_used_again_shows_nothing_of_its_last_request():
    records = LogprobStore(requests=1)
    write(records, "a", range(50), -1.0, drafted=1, accepted=1)
    records.take("a", 0, 50)
    write(records, "b", [3], -7.0)
    logprobs, _, margins, drafted, accepted, *_ = records.take("b", 3, 2)
    assert margins.tolist() == [0.5, np.inf]
    assert logprobs[0] == -7.0
    assert np.isnan(logprobs[1])  # never drawn
    assert (drafted, accepted) == (0, 0)


def test_taken_arrays_are_not_written_any_more():
    records = LogprobStore(requests=1)
    write(records, "a", [0], -1.0)
    taken = records.take("a", 0, 1)[0]
    write(records, "b", [0], -9.0)
    assert taken.tolist() == [-1.0]


def test_what_was_never_sampled_has_no_records():
    records = LogprobStore()
    assert records.take("a", 10, 0)[3:] == (0, 0, (), ())
    with pytest.raises(KeyError):
        records.take("a", 10, 1)


def test_a_position_before_the_first_is_refused():
    records = LogprobStore()
    write(records, "a", [5], -1.0)
    with pytest.raises(ValueError, match="before the first"):
        write(records, "a", [4], -1.0)
    with pytest.raises(ValueError, match="before the first"):
        records.take("a", 4, 1)
    assert len(records) == 1


def test_likeliest_tokens_are_those_of_the_last_draw_and_leave_with_their_request():
    records = LogprobStore(requests=1)
    for position, top in ((3, 5), (4, 6), (4, 7)):
        slots = records.slots(["a"], np.array([3]))
        records.write(slots, np.array([position]), -1.0, -1.0, 0.5)
        more = {"tops": {1: ((top, -0.5),)}, "masks": {1: (top, 9)}}
        records.write_more(slots, np.array([position]), np.array([1]), more)
    taken = records.take("a", 3, 2)
    assert taken.tops == (((5, -0.5),), ((7, -0.5),)) and taken.masks == ((5, 9), (7, 9))
    write(records, "b", [3], -1.0)
    assert records.take("b", 3, 1).tops == records.take("c", 3, 0).masks == ()


def test_a_redrawn_token_takes_the_place_of_the_first_draw():
    records = LogprobStore()
    for name, top in (("a", 5), ("redraw", 6)):
        positions = [3, 4] if name == "a" else [4]
        write(records, name, positions, -float(top))
        slots = records.slots([name] * len(positions), np.array(positions))
        rows = np.arange(len(positions))
        more = {"masks": {row: (top,) for row in rows.tolist()}}
        records.write_more(slots, np.array(positions), rows, more)
    whole = records.take("a", 3, 2).redrawn(1, records.take("redraw", 4, 1))
    assert whole.masks == ((5,), (6,)) and whole.tops == () and whole.logprobs.tolist() == [-5.0, -6.0]


def test_a_record_continues_with_another():
    records = LogprobStore()
    write(records, "a", [0, 1], -1.0, drafted=[3, 0], accepted=[1, 0])
    write(records, "b", [2], -2.0, drafted=1)
    whole = DrawRecord.none().then(records.take("a", 0, 2)).then(records.take("b", 2, 1))
    assert whole.logprobs.tolist() == [-1.0, -1.0, -2.0] and whole.raw_logprobs.tolist() == [-2.0, -2.0, -3.0]
    assert whole.margins.tolist() == [0.5] * 3 and (whole.drafted, whole.accepted) == (4, 1)
