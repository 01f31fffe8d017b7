"""Orders of the learner: questions of a step, gradients of a step, samples ahead of it."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.app.train.feed.modes import Mode, lookahead_of
from tailrace.app.train.gradients.gradient_order import GradientOrder, by_expected_length
from tailrace.app.train.question_order import QuestionOrder
from tailrace.app.train.record.ledger import Staleness
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.sent_weights import SentWeights, staleness
from tailrace.app.train.task import Question
from tailrace.deployments.messages.rollout import SampleResult


def questions(count):
    return [Question(f"q{number}", "text", None) for number in range(count)]


@given(count=st.integers(1, 12), groups=st.integers(1, 5), seed=st.integers(0, 3))
def test_an_epoch_has_every_question_once_in_an_order_of_its_own(count, groups, seed):
    order = QuestionOrder(questions(count), groups, seed)
    taken = [question.question_id for step in range(2 * count) for question in order.of(step)]
    epochs = [taken[first : first + count] for first in range(0, 2 * count, count)]
    assert all(sorted(epoch) == sorted(f"q{number}" for number in range(count)) for epoch in epochs)
    assert order.of(1) == QuestionOrder(questions(count), groups, seed).of(1), "whatever was asked for before"


def test_epochs_and_seeds_have_other_orders():
    order, other = QuestionOrder(questions(50), 50, 0), QuestionOrder(questions(50), 50, 1)
    assert len({order.of(0), order.of(1), other.of(0)}) == 3


@given(count=st.integers(1, 12), groups=st.integers(1, 5), seed=st.integers(0, 3), ahead=st.integers(0, 2))
def test_by_length_too_an_epoch_has_every_question_once(count, groups, seed, ahead):
    asked = []

    def longest(steps):
        asked.append(steps)
        return {f"q{number}": (7 * number) % 5 for number in range(min(count, steps * groups))}

    order = QuestionOrder(questions(count), groups, seed, longest, ahead)
    taken = []
    for step in range(3 * count):
        asked.clear()
        taken += [question.question_id for question in order.of(step)]
        assert all(steps <= max(0, step - ahead) for steps in asked), "steps that had ended when it began"
    for first in range(0, 3 * count, count):
        assert sorted(taken[first : first + count]) == sorted(f"q{number}" for number in range(count))
    again = QuestionOrder(questions(count), groups, seed, longest, ahead)
    assert again.of(2 * count - 1) == order.of(2 * count - 1), "a run that continues there has the same"


def test_steps_by_length_have_questions_of_like_length_in_no_order_of_length():
    lengths = {f"q{number}": number for number in range(40)}
    order = QuestionOrder(questions(40), 4, 0, lambda steps: lengths if steps else {})
    assert order.of(3) == QuestionOrder(questions(40), 4, 0).of(3), "nothing is known in the first epoch"
    steps = [[lengths[question.question_id] for question in order.of(step)] for step in range(10, 20)]
    assert all(max(step) - min(step) == 3 for step in steps)
    firsts = [min(step) for step in steps]
    assert firsts != sorted(firsts) and firsts != sorted(firsts, reverse=True)
    assert any(step != sorted(step) for step in steps), "within a step they keep the shuffle's order"


def test_a_step_of_two_epochs_has_the_short_questions_of_both():
    lengths = {f"q{number}": number for number in range(10)}
    order = QuestionOrder(questions(10), 4, 0, lambda steps: lengths)
    assert {question.question_id for question in order.of(2)} == {"q0", "q1"}


def test_the_shortest_expected_group_is_first_and_unknown_ones_are_average():
    assert by_expected_length(["a", "b", "c", "new"], {"a": 9, "b": 1, "c": 9, "other": 1}) == (1, 3, 0, 2)
    assert by_expected_length(["a", "b"], {}) == (0, 1)


@given(data=st.data(), count=st.integers(1, 7), held=st.integers(0, 3))
def test_every_group_is_begun_once_and_few_before_their_turn(data, count, held):
    places = data.draw(st.permutations(range(count)))
    endings = data.draw(st.permutations(range(count)))
    order, ended, begun = GradientOrder(places, held), set(), []
    while len(begun) < count:
        place = order.next(ended)
        if place is None:
            ended.add(endings[len(ended)])  # there is one left: else all could begin
            continue
        assert place in ended
        order.begin(place)
        begun.append(place)
        in_turn = next((turn for turn, each in enumerate(places) if each not in begun), count)
        assert len(begun) - in_turn <= held
    assert sorted(begun) == list(range(count))


def test_a_group_waits_for_its_turn_unless_its_gradient_may_be_held():
    assert GradientOrder((0, 1, 2), 0).next({1, 2}) is None
    assert GradientOrder((0, 1, 2), 1).next({1, 2}) == 1
    order = GradientOrder((0, 1, 2), 1)
    order.begin(1)
    assert order.next({1, 2}) is None
    assert order.next({0, 1, 2}) == 0


def test_how_far_ahead_each_mode_goes():
    ahead = {mode: lookahead_of(mode, 3).ahead for mode in Mode}
    assert ahead == {"sync": 0, "overlap": 0, "one_step_off": 1, "bounded": 3, "bounded_groups": 3}
    assert [mode for mode in Mode if not lookahead_of(mode, 3).drains] == ["bounded", "bounded_groups"]


def test_staleness_is_by_token(tmp_path):
    rows = RowFile(tmp_path / "weights.jsonl", SentWeights)
    for step in (3, 4, 5):
        rows.append(SentWeights(step=step, version=step + 10, digest=f"d{step}"))
    segments = [
        {"weights_version": 13, "weights_digest": "d3", "replica_id": "r", "start": 0, "end": 2},
        {"weights_version": 15, "weights_digest": "d5", "replica_id": "r", "start": 2, "end": 8},
    ]
    sample = SampleResult(
        sample_index=0, token_ids=(1,) * 8, text="", logprobs=(0.0,) * 8, raw_logprobs=(0.0,) * 8,
        finish_reason="stop", segments=segments,
    )  # fmt: skip
    assert staleness(rows, 5, [sample], [5]) == Staleness(mean=0.5, max=2, in_flight=0.5)
    assert staleness(rows, 5, [sample], [4]) == Staleness(mean=0.5, max=2, in_flight=0.25, in_queue=0.25)
    assert staleness(rows, 5, [], []) == Staleness(mean=0.0, max=0)
