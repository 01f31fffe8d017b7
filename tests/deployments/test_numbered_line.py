"""Numbered messages come once each and in order over a way that loses and repeats frames."""

from random import Random

import pytest

from tailrace.deployments.channel.numbered import HEADER, RESEND_S, NumberedEnd


class End(NumberedEnd):
    """An end whose messages are bytes. `frames`: what it has sent and `taken_out` has not returned."""

    def __init__(self):
        self.frames: list[bytes] = []
        super().__init__(bytes, bytes, self.frames.append)

    def taken_out(self) -> list[bytes]:
        taken, self.frames[:] = list(self.frames), []
        return taken

    def sent(self, message: bytes, now_s: float = 0.0) -> bytes:
        self.send(message, now_s)
        return self.taken_out()[-1]

    def acknowledgement(self) -> bytes:
        self.send_once(b"")
        return self.taken_out()[-1]

    def overdue(self, now_s: float) -> list[bytes]:
        self.resend(now_s)
        return self.taken_out()


def exchange(seed: int, count: int = 40) -> tuple[list[bytes], list[bytes]]:
    """Both ends send `count` messages over ways that lose a third of all frames and repeat some."""
    rng, ends, got, now_s = Random(seed), (End(), End()), ([], []), 0.0
    left = [count, count]

    def carry(sender: int) -> None:
        for frame in ends[sender].taken_out():
            for _ in range(rng.choice((0, 1, 1, 2))):
                message = ends[1 - sender].take(frame, now_s)
                if message:
                    got[1 - sender].append(message)

    while any(left) or any(end._unacknowledged for end in ends):
        now_s += rng.random()
        for sender in (0, 1):
            if left[sender]:
                left[sender] -= 1
                ends[sender].send(b"%d/%d" % (sender, count - left[sender]), now_s)
            ends[sender].resend(now_s)
            ends[sender].send_once(b"")
            carry(sender)
    return got


@pytest.mark.parametrize("seed", range(20))
def test_every_message_comes_once_and_in_order(seed):
    first, second = exchange(seed)
    assert first == [b"1/%d" % n for n in range(1, 41)]
    assert second == [b"0/%d" % n for n in range(1, 41)]


def test_nothing_is_sent_again_before_its_time_or_after_its_acknowledgement():
    here, there = End(), End()
    number = here.send(b"a", 1.0)
    (frame,) = here.taken_out()
    assert here.overdue(1.0 + RESEND_S / 2) == [] and not here.has_come(number)
    assert here.overdue(1.0 + RESEND_S) == [frame]
    assert there.take(frame, 2.0) == b"a" and there.take(frame, 2.0) is None
    here.take(there.acknowledgement(), 3.0)
    assert here.has_come(number) and not here._unacknowledged and here.overdue(100.0) == []


def test_messages_are_sent_again_once_in_each_time_and_a_new_one_begins_its_own():
    here, there = End(), End()
    frame = here.sent(b"a")
    assert [now for now in range(20) if here.overdue(float(now))] == [3, 6, 9, 12, 15, 18]
    here.take(there.acknowledgement(), 18.5)
    assert there.take(frame, 19.0) == b"a"
    here.take(there.acknowledgement(), 19.5)
    here.sent(b"b", 100.0)
    assert here.overdue(100.5) == [] and len(here.overdue(100.0 + RESEND_S)) == 1


def test_numbers_begin_at_one_and_an_acknowledged_part_begins_the_time_of_the_rest_anew():
    here, there = End(), End()
    frames = [here.sent(message) for message in (b"a", b"b")]
    assert [HEADER.unpack_from(frame) for frame in frames] == [(1, 0), (2, 0)]
    assert there.take(frames[0], 1.0) == b"a"
    here.take(there.acknowledgement(), 2.0)
    assert here.overdue(RESEND_S) == [] and [frame[HEADER.size :] for frame in here.overdue(2.0 + RESEND_S)] == [b"b"]


@pytest.mark.parametrize("frame", [b"", b"short", HEADER.pack(0, 7) + b"acknowledges messages that were never sent"])
def test_ill_formed_frames_are_refused(frame):
    with pytest.raises(ValueError):
        End().take(frame, 0.0)


def test_a_message_that_cannot_be_encoded_leaves_no_number_behind():
    here, there = End(), End()
    with pytest.raises(TypeError):
        here.send(None, 0.0)
    assert here.taken_out() == [] and there.take(here.sent(b"a"), 0.0) == b"a"


def test_a_message_after_a_gap_waits_for_the_one_before():
    here, there = End(), End()
    lost, second = here.sent(b"a"), here.sent(b"b")
    assert there.take(second, 0.0) is None
    assert [there.take(frame, 5.0) for frame in here.overdue(5.0)] == [b"a", b"b"]
    assert lost == here.overdue(10.0)[0]
