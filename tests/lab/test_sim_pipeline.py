"""The pipeline's clock: nothing is lost or made twice, nobody does two things at once, weights lack one training."""

import json
from itertools import pairwise

import numpy as np
import pytest

from tailrace.lab.research.histopipe.batch import NO_DRAFTS, AnswerBatch, BatchAnswer, Drafts, expected_s
from tailrace.lab.research.histopipe.policy import HistoPipeline
from tailrace.lab.research.histopipe.systems import MODES, host_of, run_pipeline
from tailrace.lab.simulator.types import Cluster, ReplicaModel, StepModel, WorkloadGroup

STEP = StepModel(0.01, 1e-4, 1e-7)
MODEL = ReplicaModel(STEP, 40_000, 32, 10_000.0, 0.0, 0.0)
CLUSTER = Cluster(MODEL, 6)
DRAFTS = Drafts(2.0, 3.0, 8)
KNOBS = HistoPipeline(ranking_groups=3, least_growth=1.0, last_share=0.3)


def steps_of(epochs: int = 3, per_epoch: int = 2, prompts: int = 18, samples: int = 4, spread: float = 0.7) -> list:
    """Prompts whose level stays and whose answers spread around it; each epoch knows the ones before."""
    rng = np.random.default_rng(5)
    level, past, steps = rng.normal(6.0, spread, prompts * per_epoch), {}, []
    for _ in range(epochs):
        drawn = np.exp(level[:, None] + rng.normal(0, 0.3, (len(level), samples))).round().astype(int).clip(1, 4000)
        for part in np.split(rng.permutation(len(level)), per_epoch):
            groups = [WorkloadGroup(f"p{i:02}", 50, tuple(drawn[i].tolist()), tuple(past.get(i, ()))) for i in part]
            steps.append(tuple(groups))
        past = {i: [tuple(drawn[i].tolist()), *past.get(i, [])][:2] for i in range(len(level))}
    return steps


def work_bound_s(steps, cluster: Cluster) -> float:
    """Lower bound of any schedule without drafts: all tokens at the speed of the largest batch, or the longest answer
    alone."""
    model = cluster.replica
    tokens = sum(length for step in steps for group in step for length in group.lengths)
    context = sum(n * (group.prompt_tokens + n / 2) for step in steps for group in step for n in group.lengths)
    per_token_s = model.step.base_s / model.max_running + model.step.token_s
    spread_s = (tokens * per_token_s + context * model.step.context_s) / cluster.replicas
    longest = max(length for step in steps for group in step for length in group.lengths)
    return max(spread_s, longest * (model.step.base_s + model.step.token_s))


STEPS = steps_of()
TOKENS = sum(length for step in STEPS for group in step for length in group.lengths)


def played(mode: str, migrate: bool = True, drafts: Drafts = NO_DRAFTS, steps=STEPS):
    host = host_of(steps, CLUSTER, mode, train_s=2.0, weights_s=0.5, migrate=migrate, drafts=drafts, policy=KNOBS)
    host.run()
    return host


@pytest.fixture(scope="module", params=[(m, d) for m in MODES for d in (NO_DRAFTS, DRAFTS)], ids=str)
def host(request):
    mode, drafts = request.param
    return mode, played(mode, drafts=drafts)


def test_every_answer_ends_once_and_every_token_is_made_once(host):
    _, run = host
    lengths = sorted(length for step in STEPS for group in step for length in group.lengths)
    assert sorted(answer.length for answer in run.ended) == lengths
    assert all(answer.generated == answer.length for answer in run.ended)
    assert sum(batch.made for batch in run.batches) == pytest.approx(TOKENS, rel=1e-9)


def test_a_worker_works_on_one_step_after_the_other(host):
    _, run = host
    for worker in range(CLUSTER.replicas):
        turns = [turn for turn in run.turns if turn.worker == worker]
        assert [turn.step for turn in turns] == list(range(len(STEPS)))
        assert all(turn.begin_s <= turn.end_s for turn in turns)
        assert all(before.end_s <= later.begin_s for before, later in pairwise(turns))


def test_weights_lack_one_training_at_most_and_training_waits_for_the_whole_step(host):
    mode, run = host
    assert all(0 <= turn.step - turn.version <= (0 if mode == "sequential" else 1) for turn in run.turns)
    for step, trained_s in enumerate(run.trained_s):
        begun = trained_s - 2.0
        assert sum(answer.step <= step for answer in run.ended) >= sum(len(g.lengths) for g in STEPS[step])
        if mode in ("sequential", "naive"):
            assert begun >= max(turn.end_s for turn in run.turns if turn.step == step) - 1e-9
    assert all(later - before >= 2.0 - 1e-9 for before, later in pairwise(run.trained_s))


def test_a_pipeline_that_never_waits_is_no_slower_than_barriers_and_none_beats_the_bound():
    totals = {mode: played(mode, migrate=False).trained_s[-1] for mode in MODES}
    assert totals["naive"] < totals["sequential"]
    assert min(totals.values()) >= work_bound_s(STEPS, CLUSTER)


@pytest.mark.parametrize("mode", ["alternating", "tiers"])
def test_answers_move_within_and_between_steps_never_in_the_first_epoch_nor_without_leave(mode):
    moving, still, first = played(mode), played(mode, migrate=False), played(mode, steps=STEPS[:2])
    assert moving.moved_within + moving.moved_on > 0
    assert still.moved_within + still.moved_on == first.moved_within + first.moved_on == 0
    assert moving.moved_within + moving.moved_on < KNOBS.last_share * len(moving.ended)


def test_the_same_steps_give_the_same_bytes_and_drafts_are_faster():
    for mode in MODES:
        plain, again, drafted = (
            run_pipeline(STEPS, CLUSTER, mode, train_s=2.0, weights_s=0.5, drafts=drafts, policy=KNOBS)
            for drafts in (NO_DRAFTS, NO_DRAFTS, DRAFTS)
        )
        assert json.dumps(plain) == json.dumps(again)
        assert 0 <= plain["bubbles"] < 1
        assert drafted["total_s"] < plain["total_s"]


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="unknown mode"):
        run_pipeline(STEPS, CLUSTER, "other", train_s=0.0, weights_s=0.0)
    with pytest.raises(ValueError, match="prompts"):
        run_pipeline([()], CLUSTER, "naive", train_s=0.0, weights_s=0.0)


# ---- the batch -----------------------------------------------------------------------------------------


def answers_of(lengths, prompt: int = 50, drafted: bool = False) -> list[BatchAnswer]:
    return [BatchAnswer(f"g{i}", prompt, length, drafted, 0, 0, length) for i, length in enumerate(lengths)]


def run_out(batch: AnswerBatch) -> list[tuple[int, float]]:
    ends = []
    while len(batch):
        now = batch.due_s()
        stopped = batch.turn()
        assert batch.clock_s == now
        for answer in stopped:
            batch.leave(answer)
            ends.append((answer.length, now))
    return ends


def step_by_step(lengths: list[int], prompt: int, model: ReplicaModel) -> list[tuple[int, float]]:
    """The same engine, played one step at a time."""
    now, waiting, running, ends = 0.0, list(lengths), [], []
    while waiting or running:
        while waiting and len(running) < model.max_running:
            held = sum(prompt + length for length, _ in running)
            if running and held + prompt + waiting[0] > model.kv_capacity_tokens:
                break
            running.append((waiting.pop(0), 0))
            now += prompt / model.prefill_tokens_s
        now += model.step.seconds(len(running), sum(prompt + made for _, made in running))
        running = [(length, made + 1) for length, made in running]
        ends += [(length, now) for length, made in running if made == length]
        running = [(length, made) for length, made in running if made < length]
    return ends


@pytest.mark.parametrize(("capacity", "most"), [(40_000, 64), (2_000, 64), (40_000, 5)])
def test_the_closed_form_is_the_engine_played_step_by_step(capacity, most):
    model = ReplicaModel(STEP, capacity, most, 10_000.0, 0.0, 0.0)
    lengths = np.random.default_rng(3).integers(1, 400, 24).tolist()
    batch = AnswerBatch(model, NO_DRAFTS)
    batch.submit(answers_of(lengths), 0.0)
    found, wanted = sorted(run_out(batch)), sorted(step_by_step(lengths, 50, model))
    assert [length for length, _ in found] == [length for length, _ in wanted]
    assert [at_s for _, at_s in found] == pytest.approx([at_s for _, at_s in wanted], rel=1e-3)


def test_drafts_are_on_from_a_batch_size_down_and_shorten_the_tail():
    lengths = [100] * 8 + [1000]
    ends = {}
    for drafts in (NO_DRAFTS, Drafts(2.0, 0.0, 1)):
        batch = AnswerBatch(MODEL, drafts)
        batch.submit(answers_of(lengths, 0, True), 0.0)
        ends[drafts] = [at_s for _, at_s in run_out(batch)]
    plain, drafted = ends.values()
    assert drafted[:8] == plain[:8]
    assert drafted[8] - drafted[7] == pytest.approx((plain[8] - plain[7]) / 2, rel=0.01)


def test_an_answer_that_moves_goes_on_where_it_was():
    here, there = AnswerBatch(MODEL, NO_DRAFTS), AnswerBatch(MODEL, NO_DRAFTS)
    (answer,) = answers_of([500])
    here.submit([answer], 0.0)
    here.advance(2.0)
    here.leave(answer)
    assert 0 < answer.generated < 500
    there.submit([answer], 2.0)
    run_out(there)
    assert here.made + there.made == pytest.approx(500)
    assert there.clock_s > here.due_s() or here.due_s() == np.inf


@pytest.mark.parametrize("drafts", [NO_DRAFTS, DRAFTS])
def test_the_expected_time_is_near_what_a_worker_takes(drafts):
    lengths = np.random.default_rng(4).lognormal(6, 0.8, 48).astype(int)
    batch = AnswerBatch(MODEL, drafts)
    batch.submit(answers_of(lengths.tolist(), drafted=True), 0.0)
    run_out(batch)
    assert expected_s(lengths, np.full(48, 50), MODEL, drafts) == pytest.approx(batch.clock_s, rel=0.25)
