"""Laws of a draft window, over random verifiers: how far a model runs ahead, and what a wrong token wastes at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.deployments.drafter.window import Window
from tailrace.policies.protocol.actions import DraftMode

PROMPT = 5


class Sample:
    """A window, the sample's tokens, and what its verifier has said but the drafter not yet heard."""

    def __init__(self, mode: DraftMode, truth: list[int]):
        self.mode, self.truth = mode, [0] * PROMPT + truth
        self.window = Window(PROMPT, len(self.truth), mode)
        self.verified = PROMPT

    def draft(self, tokens: list[int]) -> None:
        self.window.draft(tokens[: self.window.room])

    def hear(self, tokens: int, again: int) -> None:
        """So many tokens more are verified; the news repeats `again` old ones."""
        window, start = self.window, max(0, self.verified - again)
        self.verified = min(self.verified + tokens, len(self.truth))
        guess, known = window.guess, window.confirmed
        news = self.truth[start : self.verified]
        right = self.truth[known : self.verified]
        agrees = all(a == b for a, b in zip(guess, right, strict=False))
        judged = window.confirm(start, news)
        assert window.confirmed == self.verified, "positions move as confirmed, and only so"
        if agrees:
            assert judged.wasted is None and window.guess == guess[len(right) :]
            assert judged.resumes == (len(right) <= len(guess))
            assert judged.accepted == min(len(right), len(guess))
        else:
            most = self.mode.window if self.mode.coupled else 2 * self.mode.window
            assert 0 <= judged.wasted <= most - 1
            assert judged.accepted + 1 + judged.wasted == len(guess), "each draft is accepted, wrong, or wasted"
            assert guess[: judged.accepted] == right[: judged.accepted]
            assert not judged.resumes and window.guess == []


tokens = st.lists(st.integers(0, 1), max_size=20)
moves = st.lists(st.one_of(tokens, st.tuples(st.integers(0, 12), st.integers(0, 9))), max_size=30)


@given(
    st.builds(DraftMode, st.integers(1, 6), st.booleans()), st.lists(st.integers(0, 1), min_size=1, max_size=60), moves
)
def test_no_draft_leaves_its_window_and_no_rejection_wastes_more_than_it_may(mode, truth, played):
    sample = Sample(mode, truth)
    for move in played:
        sample.draft(move) if isinstance(move, list) else sample.hear(*move)
        window = sample.window
        end = window.confirmed + len(window.guess)
        assert end <= window.confirmed + (1 if mode.coupled else 2) * mode.window
        assert end <= max(len(sample.truth), window.confirmed)
        assert window.room >= 0


@pytest.mark.parametrize(("coupled", "ahead"), [(False, 8), (True, 4)])
def test_a_drafter_that_is_coupled_waits_after_one_window(coupled, ahead):
    window = Window(10, 1000, DraftMode(4, coupled))
    window.draft([1] * ahead)
    assert window.room == 0
    with pytest.raises(ValueError, match="room for 0"):
        window.draft([1])
    window.confirm(10, [1, 1])
    assert window.room == 2


def test_the_worst_rejection_wastes_all_but_the_wrong_token():
    window = Window(10, 1000, DraftMode(4, False))
    window.draft([1] * 8)
    assert window.confirm(10, [2]) == (0, 7, False)
    assert (window.confirmed, window.room) == (11, 8)


def test_behind_a_token_that_ends_the_sample_nothing_is_drafted_unless_it_was_wrong():
    window = Window(10, 1000, DraftMode(4, False))
    window.draft([1, 0], stopped=True)
    assert window.room == 0
    window.confirm(10, [1])
    assert window.room == 0
    window.confirm(11, [5])
    assert window.room == 8


def test_news_with_a_hole_before_it_changes_nothing():
    window = Window(10, 1000, DraftMode(4, False))
    with pytest.raises(ValueError, match="only 10 tokens are known"):
        window.confirm(12, [1])
    assert window.confirmed == 10
