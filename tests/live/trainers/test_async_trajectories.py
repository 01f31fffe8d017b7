"""A harness's trajectories for TRL's real `AsyncGRPOTrainer`. A model in this process answers for the service."""

import asyncio
import itertools

import numpy as np
import pytest
from datasets import Dataset
from live.trainers.async_trainer import SAMPLES, arguments, logged, watched
from live.trainers.stand_in import StandIn
from live.trainers.stand_in_agents import AgentsStandIn
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOTrainer

from tailrace import AsyncTrajectories, AsyncWeights
from tailrace.app.errors import BadInput, Failed
from tailrace.app.http.trajectory import TrajectoryRows
from tailrace.app.http.trajectory_groups import EndedTrajectory, TrajectoryGroup
from tailrace.app.trl.played_group import GroupPlayer

pytestmark = pytest.mark.usefixtures("on_a_cpu")

TASKS = [{"place": place, "question": f"Count to {place}:"} for place in range(6)]


async def two_turns(trajectory, task) -> float:
    said = await trajectory.turn(task["question"])
    said += await trajectory.turn("And then?")
    return float(len(set(said)))


async def with_an_aside(trajectory, task) -> float:
    reward = await two_turns(trajectory, task)
    await trajectory.aside("Give it a title:")
    return reward


def worker_of(model, service, args, play, **settings):
    weights = AsyncWeights(service)
    tokenizer, data = AutoTokenizer.from_pretrained(model), Dataset.from_list(TASKS)
    worker = AsyncTrajectories(
        service, weights, play=play, args=args, train_dataset=data, processing_class=tokenizer, **settings
    )
    return worker, weights, data


def trainer_of(model, tmp_path, service, play, limits=None, **settings):
    args = arguments(tmp_path, **settings)
    worker, weights, data = worker_of(model, service, args, play, limits=limits)
    return AsyncGRPOTrainer(
        str(model), args=args, train_dataset=data, rollout_worker=worker, weight_transfer=weights,
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip


def rows_of(group) -> list:
    return [row for one in group.trajectories if one.error is None for row in one.rows.rows]


@pytest.mark.parametrize(("play", "rows"), [(two_turns, 1), (with_an_aside, 2)])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_samples_are_the_rows_of_whole_groups_within_the_staleness(small_model, tmp_path, max_staleness, play, rows):
    service = AgentsStandIn(small_model)
    trainer = trainer_of(small_model, tmp_path, service, play, max_staleness=max_staleness)
    drawn = watched(trainer)
    trainer.train()
    assert [version for version, _ in service.updates] == [1, 2, 3, 4], "before the first step, and after each"
    numbers = itertools.groupby((sample for sample, _ in drawn), lambda sample: sample.group_id)
    for place, (number, samples) in enumerate((number, list(found)) for number, found in numbers):
        expected = rows_of(service.groups[str(number)])
        assert place == number and len(expected) == rows * SAMPLES
        assert len(samples) == len(expected) or samples[-1] is drawn[-1][0], "whole, but for the last draw"
        for sample, row in zip(samples, expected, strict=False):
            assert sample.input_ids.tolist() == list(row.token_ids)
            assert sample.completion_mask.tolist() == list(row.mask)
            np.testing.assert_array_equal(sample.old_log_probs, np.float32(row.logprobs))
            of_row = {span.version for turn in row.turns for span in turn.weight_versions if row.mask[span.start]}
            assert sample.model_version == min(of_row) and sample.metrics["rollout/newest_version"] == max(of_row)
    assert max(logged(trainer, "sample/staleness_max")) <= max_staleness
    assert max_staleness == 2 or {sample.model_version for sample, _ in drawn} != {1}, "later ones have later weights"
    assert (rows > 1 and not max_staleness) or not logged(trainer, "sample/dropped_stale_total")
    ratios = logged(trainer, "ratio")
    assert ratios[0] == pytest.approx(1, abs=1e-3), "the first step has its own weights' samples"
    assert len(ratios) == 3 and ratios == pytest.approx([1, 1, 1], abs=0.2)
    assert set(logged(trainer, "trajectories/rows")) == {rows}
    assert len(logged(trainer, f"rewards/{play.__name__}")) == 3
    assert not trainer.rollout_worker._thread.is_alive() and all(one.has_ended for one in service.opened)


def test_trajectories_have_the_trainers_names_distribution_and_limits(small_model, tmp_path):
    service = AgentsStandIn(small_model)
    settings = {"temperature": 0.8, "top_p": 0.9, "max_steps": 1}
    trainer = trainer_of(small_model, tmp_path, service, two_turns, limits={"turns": 3}, **settings)
    trainer.train()
    openings = [one.tree.opening for one in service.opened]
    assert [one.index for one in openings[:SAMPLES]] == list(range(SAMPLES))
    steps = {one.group: one.settings.step for one in openings}
    assert steps == {str(number): number // 2 for number in range(len(steps))}
    assert {one.settings.seed for one in openings} == {7} and {one.limits.turns for one in openings} == {3}
    assert all(
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.0, "frequency_penalty": 0.0}.items()
        <= one.sampling.model_dump().items()
        for one in openings
    )
    mates = service.groups["0"].trajectories
    assert len({one.rows.rows[0].token_ids for one in mates}) > 1, "the harness asks for a temperature of 0"


def test_a_trajectory_without_a_reward_has_no_advantage_and_one_that_failed_no_samples(small_model, tmp_path, caplog):
    async def flaky(trajectory, task):
        reward = await two_turns(trajectory, task)
        if trajectory.tree.opening.index == 1:
            raise TimeoutError("the sandbox\nis gone")
        return None if trajectory.tree.opening.index == 2 else reward

    service = AgentsStandIn(small_model)
    trainer = trainer_of(small_model, tmp_path, service, flaky, max_steps=1)
    drawn = watched(trainer)
    trainer.train()
    first = [sample for sample, _ in drawn if sample.group_id == 0]
    totals = [one.given for one in service.opened[:SAMPLES] if one.given is not None]
    assert len(first) == 3 and len(totals) == 2
    wanted = (np.array(totals) - np.mean(totals)) / (np.std(totals) + 1e-8)
    assert [sample.advantage for sample in first] == pytest.approx([wanted[0], 0.0, wanted[1]])
    assert logged(trainer, "trajectories/failed") == [0.25]
    assert "group 0, trajectory 1 has no reward: TimeoutError: is gone" in caplog.messages


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ZeroDivisionError("broken"), "all trajectories have failed, the first one by ZeroDivisionError: broken$"),
        (None, "no trajectory has called the model; play has to give its harness trajectory.base_url and"),
    ],
)
def test_a_harness_that_never_works_ends_training_with_its_reason(small_model, tmp_path, error, reason):
    async def broken(trajectory, task):
        if task["place"] > 1:
            await asyncio.sleep(3600)
        if error is not None:
            raise error
        return 1.0

    service = AgentsStandIn(small_model)
    trainer = trainer_of(small_model, tmp_path, service, broken)
    with pytest.raises(Failed, match=rf"^group [01]: {reason}"):
        trainer.train()
    assert not trainer.rollout_worker._thread.is_alive()
    assert len(service.opened) > SAMPLES and all(one.has_ended for one in service.opened), "also those that hung"


def test_an_error_of_the_service_ends_training_with_its_reason(small_model, tmp_path):
    class Full(AgentsStandIn):
        async def trajectory_groups(self, *_, **__):
            raise ConnectionError("http://127.0.0.1:1: refused")
            yield

    with pytest.raises(Failed, match=r"^ConnectionError: http://127\.0\.0\.1:1: refused$"):
        trainer_of(small_model, tmp_path, Full(small_model), two_turns).train()


def test_what_cannot_play_is_refused_in_one_line(small_model, tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(BadInput, match=r"^client is a StandIn; trajectories go by HTTP: give a tailrace\.http"):
        worker_of(small_model, StandIn(small_model), args, two_turns)
    with pytest.raises(BadInput, match=r"^play is no coroutine function: write `async def play\(trajectory, task\)`$"):
        worker_of(small_model, AgentsStandIn(small_model), args, lambda trajectory, task: 1.0)
    with pytest.raises(BadInput, match=r"repetition_penalty is 1\.2"):
        worker_of(small_model, AgentsStandIn(small_model), arguments(tmp_path, repetition_penalty=1.2), two_turns)


def turn(number, parent, start, end, *spans):
    versions = [{"version": version, "start": first, "end": last} for version, first, last in spans]
    return {
        "turn": number, "parent": parent, "start": start, "end": end, "weight_versions": versions,
        "finish_reason": "stop", "reencoded_tokens": 0,
    }  # fmt: skip


def test_a_rows_version_is_that_of_its_oldest_trained_token(small_model, tmp_path):
    """Answers [2, 4) under 6 and 7, [5, 6) under 9; the second row goes on from the first answer, under 8."""
    first = turn(0, None, 2, 4, (6, 2, 3), (7, 3, 4))
    rows = [
        {"token_ids": [5, 6, 7, 8, 9, 10], "mask": [0, 0, 1, 1, 0, 1], "logprobs": [0, 0, -1, -2, 0, -3],
         "turns": [first, turn(1, 0, 5, 6, (9, 5, 6))]},
        {"token_ids": [5, 6, 7, 8, 11, 12], "mask": [0, 0, 0, 0, 0, 1], "logprobs": [0, 0, -1, -2, 0, -4],
         "turns": [first, turn(2, 0, 5, 6, (8, 5, 6))]},
    ]  # fmt: skip
    found = TrajectoryRows.model_validate(
        {"id": "i", "group": "0", "index": 0, "reward": 1.0, "rows": rows, "turns": 3, "branches": 1,
         "sampled_tokens": 4, "reencoded_tokens": 0}
    )  # fmt: skip

    class Played:
        async def trajectory_groups(self, tasks, play, samples, at_once, **request):
            yield TrajectoryGroup("0", (EndedTrajectory(0, found),))

    args, tokenizer = arguments(tmp_path), AutoTokenizer.from_pretrained(small_model)
    player = GroupPlayer(Played(), two_turns, args=args, tokenizer=tokenizer, limits={})
    group = asyncio.run(player.make(0, TASKS[0], lambda version: version - 5))
    assert [(sample.model_version, newest) for sample, newest in zip(group.samples, group.newest, strict=True)] == [
        (1, 4), (3, 3),
    ]  # fmt: skip
    assert group.samples[1].completion_mask.tolist() == [0, 0, 0, 0, 0, 1]
    assert group.samples[1].prompt[0]["content"] == tokenizer.decode([5, 6, 7, 8, 11])
    assert group.metrics["trajectories/rows"] == (2.0, 1.0) and group.metrics["trajectories/turns"] == (3.0, 1.0)
