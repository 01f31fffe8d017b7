"""`bounded_groups` of the learner: whole groups as they end, once each and within the bound, long ones as often."""

from collections.abc import Iterator
from heapq import heappop, heappush
from random import Random
from statistics import mean
from threading import Event
from types import SimpleNamespace

import pytest
from first_ended import FirstEnded

from tailrace.app.train.feed import group_feed, running_step
from tailrace.app.train.feed.group_feed import GroupFeed
from tailrace.app.train.feed.modes import Mode, lookahead_of
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

SIZE, STEPS, SAMPLES = 4, 24, 2


class Clocked(GroupFeed):
    """A feed whose service takes as long for a group as its length. Time passes while the trainer waits for it."""

    def __init__(self, lengths: dict[tuple[int, int], int], trained=(), **changes):
        self.lengths, self.now_s, self.ends, self.cancelled = lengths, 0.0, [], []
        self.waits: dict[tuple[int, int], tuple[float, int, Event]] = {}  # end, place, and its event
        self.begun: dict[tuple[int, int], int] = {}  # updates as the samples of a question began
        self.stored: dict[int, list] = {}
        given = {
            "client": SimpleNamespace(cancel_blocking=self._cancel),
            "weights": SimpleNamespace(send=lambda: None, version=1),
            "lookahead": lookahead_of(Mode.BOUNDED_GROUPS, 2),
            "groups_of": prompts,
            "roll_out": self._roll_out,
            "on_group": lambda group: None,
            "steps": STEPS,
            "seed": 0,
        }
        super().__init__(size=SIZE, trained=trained, keep=self.stored.__setitem__, **(given | changes))
        self.waits_s = 60.0  # for a group that has ended on this clock, and comes on another thread

    def _roll_out(self, batch: RolloutBatch) -> Iterator[SimpleNamespace]:
        waits = [self.waits.pop((batch.step, int(one.prompt_id))) for one in batch.groups]
        for _, place, ended in sorted(waits, key=lambda wait: wait[:2]):
            ended.wait()
            if batch.batch_id in self.cancelled:
                return
            yield SimpleNamespace(step=batch.step, prompt_id=str(place), samples=())

    def _started(self, step, places=None):
        """Begins groups, each of which ends when the clock is there."""
        for place in places:
            assert (step, place) not in self.begun, "each question once"
            self.begun[step, place] = self._updates
            end_s = self.now_s + self.lengths[step, place]
            self.waits[step, place] = end_s, place, Event()
            heappush(self.ends, (end_s, step, *self.waits[step, place][1:]))
        return super()._started(step, places)

    def _look(self, timeout_s: float) -> None:
        if timeout_s:
            self.now_s, *_, event = heappop(self.ends)
            event.set()
        super()._look(timeout_s and self.waits_s)

    def _cancel(self, batch_id: str) -> None:
        self.cancelled.append(batch_id)
        for *_, event in self.ends:
            event.set()


def prompts(step: int) -> list[PromptGroup]:
    return [PromptGroup(prompt_id=str(place), token_ids=(1,), samples=SAMPLES, max_tokens=8) for place in range(SIZE)]


def lengths_of(seed: int) -> dict[tuple[int, int], int]:
    rng = Random(seed)
    return {(step, place): rng.choice((1, 2, 3, 40)) for step in range(STEPS) for place in range(SIZE)}


def trained(feed: Clocked, first: int = 0, last: int = STEPS) -> list[list[tuple[int, int]]]:
    """Trains on steps. Returns the questions of each."""
    found = []
    for step in range(first, last):
        running = feed.begin(step)
        while len(running.ended) < SIZE:
            feed.next_group(running, len(running.ended))
        feed.end(step)
        groups = [(group.step, int(group.prompt_id)) for group in feed.stored[step]]
        assert list(feed.taken) == groups == [feed.question_of(step, place) for place in range(SIZE)]
        found.append(groups)
    return found


def test_a_step_has_whole_groups_each_once_and_within_the_bound():
    feed = Clocked(lengths_of(0))
    steps = trained(feed)
    assert sorted(one for step in steps for one in step) == sorted(feed.lengths)
    ages = [step - feed.begun[one] for step, taken in enumerate(steps) for one in taken]
    assert min(ages) >= 0 and max(ages) == 2, "as old as may be, and no older"
    queued = [step - feed.ended_at[one] for step, taken in enumerate(steps) for one in taken]
    assert min(queued) >= 0 and 0 < max(queued) <= 2, "groups wait in the queue for their trainer, too"
    assert any(one[0] != step for step, taken in enumerate(steps) for one in taken), "some overtake"
    assert feed.cancelled == []


def long_share(seeds: range, cut: slice) -> float:
    """Returns the mean length trained on over that of all samples, in some of the steps of several runs."""
    taken, all_lengths = [], []
    for seed in seeds:
        feed = Clocked(lengths_of(seed))
        taken += [feed.lengths[one] for step in trained(feed)[cut] for one in step]
        all_lengths += feed.lengths.values()
    return mean(taken) / mean(all_lengths)


@pytest.mark.slow
def test_long_answers_are_trained_on_as_often_as_they_are_made():
    assert long_share(range(12), slice(6, 18)) == pytest.approx(1.0, abs=0.06)


@pytest.mark.slow
def test_without_the_bound_short_answers_would_come_first(monkeypatch):
    monkeypatch.setattr(group_feed, "GroupTurns", FirstEnded)
    assert long_share(range(8), slice(0, 6)) < 0.9


def test_a_run_that_continues_trains_on_the_rest_and_counts_from_its_step():
    first = Clocked(lengths_of(3))
    steps = trained(first, 0, 9)
    first.close()
    done = {one for step in steps for one in step}
    assert len(first.cancelled) > 0, "what runs as a run ends is given up"
    feed = Clocked(lengths_of(3), done)
    rest = trained(feed, 9)
    assert sorted([*done, *(one for step in rest for one in step)]) == sorted(feed.lengths)
    assert all(step - feed.begun[one] <= 2 for step, taken in enumerate(rest, 9) for one in taken)


def test_a_group_that_ends_during_an_evaluation_ends_under_the_weights_that_are_evaluated():
    feed = Clocked(lengths_of(0))
    trained(feed, last=1)
    feed.send_weights(1)  # of the evaluation after the first step
    ended = len(feed.ended_at)
    feed._look(60.0)
    assert list(feed.ended_at.values())[ended:] == [1]
    feed.close()


def test_samples_that_are_on_their_way_to_the_service_end_with_the_run(monkeypatch):
    monkeypatch.setattr(running_step, "CANCEL_S", 0.01)
    ended, cancels = Event(), []

    def roll_out(batch):
        assert ended.wait(10), "the whole batch was made, and the run waited for it"
        yield from ()

    def cancel(batch_id):
        cancels.append(batch_id)
        if len(cancels) == 2:  # the service knows the batch from here on
            ended.set()

    batch = RolloutBatch(batch_id="b", groups=prompts(0))
    running_step.RunningStep(batch, roll_out, on_group=None, cancel=cancel, updates=None).stop()
    assert cancels == ["b", "b"]


def test_an_error_of_a_rollout_ends_the_wait():
    def broken(batch):
        raise RuntimeError("the service is gone")
        yield

    feed = Clocked(lengths_of(0), roll_out=broken)
    feed.waits_s = 0.01
    with pytest.raises(RuntimeError, match="the service is gone"):
        trained(feed)
