"""Numbered messages come once each and in order over a way that loses and repeats frames."""

from random import Random

import pytest

from tailrace.deployments.channel.numbered import HEADER, RESEND_S, NumberedEnd


def exchange(seed: int, count: int = 40) -> tuple[list[bytes], list[bytes]]:
    """Both ends send `count` messages over ways that lose a third of all frames and repeat some."""
    rng, ends, got, now_s = Random(seed), (NumberedEnd(), NumberedEnd()), ([], []), 0.0
    left = [count, count]

    def carry(sender: int, frame: bytes) -> None:
        for _ in range(rng.choice((0, 1, 1, 2))):
            payload = ends[1 - sender].take(frame, now_s)
            if payload:
                got[1 - sender].append(payload)

    while any(left) or any(end._unacknowledged for end in ends):
        now_s += rng.random()
        for sender in (0, 1):
            if left[sender]:
                left[sender] -= 1
                carry(sender, ends[sender].numbered(b"%d/%d" % (sender, count - left[sender]), now_s)[1])
            for frame in ends[sender].overdue(now_s):
                carry(sender, frame)
            carry(sender, ends[sender].frame(b""))
    return got


@pytest.mark.parametrize("seed", range(20))
def test_every_message_comes_once_and_in_order(seed):
    first, second = exchange(seed)
    assert first == [b"1/%d" % n for n in range(1, 41)]
    assert second == [b"0/%d" % n for n in range(1, 41)]


def test_nothing_is_sent_again_before_its_time_or_after_its_acknowledgement():
    here, there = NumberedEnd(), NumberedEnd()
    number, frame = here.numbered(b"a", 1.0)
    assert here.overdue(1.0 + RESEND_S / 2) == [] and not here.has_come(number)
    assert here.overdue(1.0 + RESEND_S) == [frame]
    assert there.take(frame, 2.0) == b"a" and there.take(frame, 2.0) is None
    here.take(there.frame(b""), 3.0)
    assert here.has_come(number) and not here._unacknowledged and here.overdue(100.0) == []


def test_messages_are_sent_again_once_in_each_time_and_a_new_one_begins_its_own():
    here, there = NumberedEnd(), NumberedEnd()
    _, frame = here.numbered(b"a", 0.0)
    assert [now for now in range(20) if here.overdue(float(now))] == [3, 6, 9, 12, 15, 18]
    here.take(there.frame(b""), 18.5)
    assert there.take(frame, 19.0) == b"a"
    here.take(there.frame(b""), 19.5)
    here.numbered(b"b", 100.0)
    assert here.overdue(100.5) == [] and len(here.overdue(100.0 + RESEND_S)) == 1


def test_numbers_begin_at_one_and_an_acknowledged_part_begins_the_time_of_the_rest_anew():
    here, there = NumberedEnd(), NumberedEnd()
    frames = [here.numbered(payload, 0.0)[1] for payload in (b"a", b"b")]
    assert [HEADER.unpack_from(frame) for frame in frames] == [(1, 0), (2, 0)]
    assert there.take(frames[0], 1.0) == b"a"
    here.take(there.frame(b""), 2.0)
    assert here.overdue(RESEND_S) == [] and [frame[HEADER.size :] for frame in here.overdue(2.0 + RESEND_S)] == [b"b"]


@pytest.mark.parametrize("frame", [b"", b"short", HEADER.pack(0, 7) + b"acknowledges messages that were never sent"])
def test_ill_formed_frames_are_refused(frame):
    with pytest.raises(ValueError):
        NumberedEnd().take(frame, 0.0)


def test_a_message_after_a_gap_waits_for_the_one_before():
    here, there = NumberedEnd(), NumberedEnd()
    lost, second = here.numbered(b"a", 0.0)[1], here.numbered(b"b", 0.0)[1]
    assert there.take(second, 0.0) is None
    assert [there.take(frame, 5.0) for frame in here.overdue(5.0)] == [b"a", b"b"]
    assert lost == here.overdue(10.0)[0]
