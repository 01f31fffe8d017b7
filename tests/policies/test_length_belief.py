"""Beliefs over lengths: the law, a prompt's level, remainders against brute force, and coverage on recorded answers."""

import gzip
import json
from math import exp, log, sqrt
from pathlib import Path

import numpy as np
import pytest

from tailrace.policies.models.length_belief import (
    LengthLaw,
    log_survival,
    normal_scores,
    ranked,
    remainders,
    score_beyond,
)
from tailrace.policies.protocol.views import BeliefView

TRACES = Path(__file__).parents[3] / "shared" / "traces"
CAP = 100_000


def drawn(prompts: int, samples: int, within: float, epochs: int = 1, persist: float = 1.0, spread: float = 0.8):
    """Lengths of prompts whose levels go from epoch to epoch, newest epoch first: int[epochs, prompts, samples]."""
    draws, level, found = np.random.default_rng(0), None, []
    for _ in range(epochs):
        new = draws.standard_normal(prompts)
        level = new if level is None else persist * level + sqrt(1 - persist**2) * new
        scores = sqrt(1 - within) * level[:, None] + sqrt(within) * draws.standard_normal((prompts, samples))
        found.insert(0, np.exp(6 + spread * scores).clip(1, CAP).astype(int))
    return np.array(found)


def known(lengths) -> list:
    newest, *past = lengths.tolist()
    return [(tuple(tuple(epoch[n]) for epoch in past), tuple(newest[n])) for n in range(len(newest))]


def view_of(made, group, finished=(), finished_group=(), level=(0.0, 1.0), cap=CAP) -> BeliefView:
    groups = max(*group, *finished_group) + 1 if finished_group else max(group) + 1
    return BeliefView(
        level_mean=np.full(groups, level[0]),
        level_variance=np.full(groups, level[1]),
        finished=np.array(finished, np.int64),
        finished_group=np.array(finished_group, np.int64),
        group=np.array(group),
        made=np.array(made),
        max_tokens=np.full(len(made), cap),
    )


def test_scores_and_survival_are_inverse():
    scores = np.linspace(-3, 8, 200)
    assert score_beyond(log_survival(scores)) == pytest.approx(scores, abs=0.01)
    assert normal_scores(3) == pytest.approx([-0.967, 0.0, 0.967], abs=0.01)
    assert list(np.argsort(ranked([3.0, -1.0, 7.5]))) == [1, 0, 2]
    assert ranked([2.0, 2.0]) == pytest.approx([0.0, 0.0], abs=0.01)


@pytest.mark.parametrize("within", [0.1, 0.5, 0.9])
def test_a_law_has_the_quantiles_and_the_likeness_of_its_answers(within):
    lengths = drawn(300, 8, within, epochs=3, persist=0.9)
    law = LengthLaw.of(known(lengths), CAP)
    assert law.tokens(np.array([0.0, 1.0])) == pytest.approx([exp(6), exp(6.8)], rel=0.1)
    assert law.score(np.array([exp(6)]))[0] == pytest.approx(0.0, abs=0.15)
    assert law.within == pytest.approx(within, abs=0.06)
    if within < 0.9:
        assert law.persist == pytest.approx(0.9, abs=0.08)


def test_few_answers_make_no_law():
    assert LengthLaw.of([((), (5,) * 31)], CAP) is None and LengthLaw.of([((), (5,) * 32)], CAP) is not None
    assert LengthLaw.of([((), (5, 9))], CAP, 2) is not None and LengthLaw.of([((), (1,) * 40)], 1) is None


def test_history_and_predictions_move_a_level_as_far_as_they_tell():
    law = LengthLaw.of(known(drawn(300, 8, 0.2, epochs=2, persist=0.95)), CAP)
    assert law.level(()) == (0.0, 1.0)
    long = int(law.tokens(np.array([1.0]))[0])
    mean, variance = law.level(((long,) * 8,))
    assert 0.8 < mean < 1.4 and variance < 0.4
    assert law.level(((long,),))[1] > variance
    poor, good = (law.predicted((0.0, 1.0), 1.0, quality) for quality in (0.3, 0.85))
    assert 0 < poor[0] < good[0] and poor[1] > 0.8 and good[1] < 0.3
    assert law.predicted((0.0, 1.0), 1.0, 0.0) == (0.0, 1.0)


def test_remainders_are_those_of_answers_that_got_as_far():
    """A prompt without mates: against all answers of the law that are longer."""
    lengths = drawn(4_000, 1, 0.5)[0].ravel()
    law = LengthLaw.of([((), tuple(lengths.tolist()))], CAP)
    for made in (0, 200, 800):
        longer = lengths[lengths > made] - made
        found = remainders(law, view_of([made], [0]), 0.5)
        assert found.mean[0] == pytest.approx(longer.mean(), rel=0.12)
        assert found.high[0] == pytest.approx(np.median(longer), rel=0.12)


def test_finished_and_running_mates_tell():
    law = LengthLaw.log_normal(6.0, 0.8, 0.1, CAP)
    short = remainders(law, view_of([10], [0], (100, 120), (0, 0)), 0.5).mean[0]
    alone = remainders(law, view_of([10], [0]), 0.5).mean[0]
    beside_long = remainders(law, view_of([10, 3_000], [0, 0]), 0.5).mean[0]
    assert short < 0.5 * alone and beside_long > 2 * alone


def test_draws_share_a_prompt_s_level_and_lie_about_the_mean():
    law = LengthLaw.log_normal(6.0, 0.8, 0.1, CAP)
    group = np.repeat(np.arange(200), 8)
    found = remainders(law, view_of([10] * 1_600, group.tolist()), 0.5, 2)
    logs = np.log(found.drawn[0]).reshape(200, 8)
    assert found.drawn.shape == (2, 1_600) and not (found.drawn[0] == found.drawn[1]).all()
    assert logs.mean(axis=1).std() > 2 * logs.std(axis=1).mean()
    assert found.drawn.mean() == pytest.approx(found.mean.mean(), rel=0.15)


def test_nothing_is_believed_beyond_the_limit():
    law = LengthLaw.log_normal(log(400), 1.5, 0.5, 1_000)
    found = remainders(law, view_of([900], [0], cap=1_000), 0.5, 1)
    assert 1.0 <= found.mean[0] <= 100.0 and 1.0 <= found.drawn[0, 0] <= 100.0


def coverage(trace: str, history: bool) -> np.ndarray:
    """Shares of remainders below the believed 10, 50 and 90 % quantiles, by ages: f64[ages, 3]."""
    path = TRACES / f"{trace}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    lengths = [[[max(1, len(s["text"]) // 4) for s in epoch["samples"]] for epoch in row["epochs"]] for row in rows]
    cap = max(max(map(max, prompt)) for prompt in lengths)
    law = LengthLaw.of([((), tuple(first)) for first, _ in lengths], cap)
    levels = np.array([law.level((first,)) if history else (0.0, 1.0) for first, _ in lengths])
    now = np.array([second[:16] for _, second in lengths])
    found = []
    for age in (np.array([0.0, 0.3, 0.6, 1.0]) * np.median(now)).astype(int).tolist():
        (group, sample), over = np.nonzero(now > age), np.nonzero(now <= age)
        view = BeliefView(
            level_mean=levels[:, 0],
            level_variance=levels[:, 1],
            finished=now[over],
            finished_group=over[0],
            group=group,
            made=np.full(len(group), age),
            max_tokens=np.full(len(group), cap),
        )
        left = now[group, sample] - age
        found.append([float((left <= remainders(law, view, part).high).mean()) for part in (0.1, 0.5, 0.9)])
    return np.array(found)


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(("trace", "within"), [("humaneval", 0.08), ("amc23", 0.3)])
def test_beliefs_cover_recorded_answers(trace, within, history):
    """The answers of amc23's second checkpoint are shorter, and the law is that of its first."""
    assert np.abs(coverage(trace, history) - (0.1, 0.5, 0.9)).max() <= within
