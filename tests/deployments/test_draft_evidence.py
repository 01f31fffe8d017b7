"""The network that chooses among candidates: it learns, its probabilities are right, and its prior is whole."""

import json

import numpy as np
import pytest

from tailrace.deployments.draft_index.alignment_state import AlignmentState
from tailrace.deployments.draft_index.group_index import GroupIndex
from tailrace.deployments.draft_index.scorer import LEARNING_RATE, LESSONS, PRIOR, CandidateScorer
from tailrace.deployments.draft_index.scorer_kernels import CANDIDATES, FEATURES, HIDDEN
from tailrace.deployments.draft_index.scorer_training import learn
from tailrace.deployments.draft_index.settings import IndexSettings

VOCABULARY, BRANCHES = 200, 3


def chain(seed, length=400, stay=0.75):
    """A text in which every token has BRANCHES followers, the first of them with the chance `stay`."""
    rng = np.random.default_rng(seed)
    followers = np.random.default_rng(0).integers(0, VOCABULARY, (VOCABULARY, BRANCHES))
    text = [0]
    for _ in range(length - 1):
        branch = 0 if rng.random() < stay else rng.integers(1, BRANCHES)
        text.append(int(followers[text[-1], branch]))
    return np.array(text, np.int32)


def predictions(evidence, groups=6, mates=12, **text):
    """(probability, right?) of drafted tokens, each given that those before it were right."""
    found = []
    for group in range(groups):
        index = GroupIndex(evidence, np.arange(900, 910, dtype=np.int32))
        for mate in range(mates):
            index.extend(mate, 0, chain(100 * group + mate, **text))
        truth, at = chain(100 * group + 99, **text), 0
        while at < len(truth) - 8:
            agreed = 0
            for token, right in zip(*index.propose(99, 8)[0][:2], strict=True):
                found.append((right, token == truth[at + agreed]))
                if token != truth[at + agreed]:
                    break
                agreed += 1
            index.extend(99, at, truth[at : at + agreed + 1])
            at += agreed + 1
    return np.array(found)


def gap(found) -> float:
    """Mean distance between predicted and observed share over tenths of probability."""
    bins = np.minimum(9, (found[:, 0] * 10).astype(int))
    return sum(abs(np.sum(found[bins == b, 0] - found[bins == b, 1])) for b in range(10)) / len(found)


def test_the_prior_is_whole():
    shapes = {name: np.shape(values) for name, values in json.loads(PRIOR.read_text()).items()}
    assert shapes == {
        "mean": (1, FEATURES),
        "scale": (1, FEATURES),
        "inner": (FEATURES, HIDDEN),
        "offset": (1, HIDDEN),
        "outer": (1, HIDDEN),
        "none": (1, 1),
    }


def askew(**knobs) -> CandidateScorer:
    """Evidence that thinks far too little of all candidates."""
    evidence = CandidateScorer(IndexSettings(**knobs))
    evidence.net[3][:] += 3
    return evidence


@pytest.mark.slow
@pytest.mark.parametrize("stay", [0.6, 0.9])
def test_a_wrong_belief_is_unlearned(stay):
    evidence = askew()
    for _ in range(3):
        predictions(evidence, stay=stay)
    assert gap(predictions(evidence, stay=stay)) < 0.6 * gap(predictions(askew(learning=False), stay=stay))


def test_without_learning_nothing_changes():
    evidence = CandidateScorer(IndexSettings(learning=False))
    before = [array.copy() for array in evidence.net]
    predictions(evidence, groups=1)
    assert all((a == b).all() for a, b in zip(before, evidence.net, strict=True))


def test_what_is_learned_is_shared_by_the_groups_of_an_engine_and_by_no_others():
    evidence, other = CandidateScorer(), CandidateScorer()
    predictions(evidence, groups=1)
    assert not np.array_equal(evidence.net[0], other.net[0])


def lesson_of(rng, count):
    lesson = AlignmentState().lesson(0)
    lesson.features[0, :count] = rng.normal(size=(count, FEATURES))
    lesson.seen[0, :count] = np.arange(count)
    lesson.seen[0, CANDIDATES] = count
    return lesson


def loss(net, lesson, truth) -> float:
    """-log P(truth) by plain numpy, in float64."""
    inner, offset, outer, none = (array.astype(np.float64) for array in net)
    count = lesson.seen[0, CANDIDATES]
    scores = np.maximum(lesson.features[0, :count] @ inner + offset, 0) @ outer[0]
    scores = np.append(scores, none[0])
    place = truth if truth < count else count
    return float(np.log(np.exp(scores - scores.max()).sum()) - (scores[place] - scores.max()))


@pytest.mark.parametrize("truth", [0, 2, 77])
def test_a_lesson_is_a_step_down_the_gradient_of_the_log_loss(truth):
    rng, rate = np.random.default_rng(truth), np.float32(1e-4)
    lesson, net = lesson_of(rng, 4), tuple(array.copy() for array in CandidateScorer().net)
    inner = net[0].astype(np.float64)
    slope = np.zeros_like(inner)
    for place in np.ndindex(inner.shape):
        sides = []
        for step in (1e-4, -1e-4):
            moved = inner.copy()
            moved[place] += step
            sides.append(loss((moved, *net[1:]), lesson, truth))
        slope[place] = (sides[0] - sides[1]) / 2e-4
    before = net[0].copy()
    assert learn(lesson.features, lesson.seen, np.array([truth], np.int32), net, rate) == 1
    step = (net[0] - before).astype(np.float64) / rate
    assert np.corrcoef(step.ravel(), -slope.ravel())[0, 1] > 0.99


def test_a_lesson_ends_with_the_first_wrong_token():
    net = tuple(array.copy() for array in CandidateScorer().net)
    lesson = AlignmentState().lesson(0)
    lesson.seen[:3, 0], lesson.seen[:3, CANDIDATES] = 5, 1
    assert learn(lesson.features, lesson.seen, np.array([5, 6, 5], np.int32), net, LEARNING_RATE) == 2
    assert learn(lesson.features, lesson.seen, np.array([5, 5, 5, 5], np.int32), net, LEARNING_RATE) == 3
    assert LESSONS >= 1
