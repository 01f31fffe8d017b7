"""Modes of the learner with TRL's real trainer: what may not change the weights, and what may."""

import math
import threading
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from live.trainers.stand_in import StandIn
from live.trainers.test_run import TASK, config_of, run
from pydantic import ValidationError
from waiting import until

from tailrace.app.errors import BadInput, Failed
from tailrace.app.train.gradients.gradient_order import by_expected_length
from tailrace.app.train.group_trainer import GroupTrainer, parts
from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.record.stored_groups import stored_groups
from tailrace.app.train.run import train
from tailrace.app.train.task import TaskConfig, read_task
from tailrace.lab.training_certificate.driver import backward_order
from tailrace.policies.protocol.actions import SampleEnd


@pytest.fixture(scope="module", autouse=True)
def length_rewards():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[2])
        yield


def unconditional(batch):
    return batch.model_copy(update={"weights_version": None})


class Ordered(StandIn):
    """Gives the groups of a batch in an order of the test's, each once the one before has been taken up."""

    def __init__(self, model, order):
        super().__init__(model)
        self.order = order

    def rollout_blocking(self, batch):
        groups = {group.prompt_id: group for group in super().rollout_blocking(batch)}
        for place in self.order:
            yield groups.pop(str(place))


def trained(model, path, service=None, order=by_expected_length, **changes):
    config = config_of(model, **{"groups": 3, "steps": 3, "task": TASK | {"held_out": 0}} | changes)
    service = service or StandIn(config.model)
    outcome = train(service, config, read_task(config.task), RunFolder(path, config), lambda text: None, order)
    return outcome.rows, service


def certificate(rows):
    return [(row.weights_checksum, row.loss, row.grad_norm, row.reward_mean, row.reward_std) for row in rows]


@pytest.fixture(scope="module")
def by_turns(small_model, tmp_path_factory):
    return certificate(trained(small_model, tmp_path_factory.mktemp("sync") / "run", mode="sync")[0])


@pytest.mark.parametrize(
    ("order", "held"),
    [
        ((2, 1, 0), 2),
        ((1, 2, 0), 0),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [((0, 1, 2), 0), ((0, 1, 2), 2), ((2, 1, 0), 0), ((1, 2, 0), 2)]
        ),
    ],
)
def test_overlap_changes_no_bit_however_groups_end(small_model, tmp_path, by_turns, order, held):
    service = Ordered(small_model, order)
    rows, _ = trained(small_model, tmp_path / "run", service, mode="overlap", trainer={"max_held_gradients": held})
    assert certificate(rows) == by_turns


def test_another_order_of_gradients_changes_the_weights(small_model, tmp_path, by_turns):
    rows, _ = trained(small_model, tmp_path / "run", mode="sync", order=backward_order)
    assert [row[0] for row in certificate(rows)] != [row[0] for row in by_turns]


def test_one_step_off_trains_on_samples_of_the_weights_before(small_model, tmp_path):
    rows, service = trained(small_model, tmp_path / "run", mode="one_step_off")
    assert [(row.staleness.mean, row.staleness.max) for row in rows] == [(0, 0), (1, 1), (1, 1)]
    assert {batch.step: batch.weights_version for batch in service.batches} == {0: 1, 1: 1, 2: 2}
    assert rows[1].logprob_difference_max > rows[0].logprob_difference_max


def test_a_run_one_step_off_that_is_stopped_continues_to_the_same_weights(small_model, tmp_path):
    config = config_of(small_model, mode="one_step_off")

    def stop_after_three(text):
        if text.startswith("step 3/4"):
            raise KeyboardInterrupt

    straight, _ = run(config, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", stop_after_three)
    outcome, _ = run(config, tmp_path / "run")
    assert certificate(outcome.rows) == certificate(straight.rows)


@pytest.mark.parametrize("mode", ["sync", pytest.param("one_step_off", marks=pytest.mark.long)])
def test_a_run_by_length_has_every_question_once_an_epoch_and_continues_to_the_same_weights(
    small_model, tmp_path, mode
):
    """Six questions, two a step: epochs of three steps, stopped in the second one."""
    task = TASK | {"train": 6}
    config = config_of(small_model, mode=mode, order="by_length", steps=6, task=task)

    def stop_after_five(text):
        if text.startswith("step 5/6"):
            raise KeyboardInterrupt

    straight, _ = run(config, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", stop_after_five)
    outcome, _ = run(config, tmp_path / "run")
    assert certificate(outcome.rows) == certificate(straight.rows)
    asked = [list(row.longest) for row in straight.rows]
    epochs = [[*chain(*asked[first : first + 3])] for first in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and len(set(epochs[0])) == 6
    shuffled, _ = run(config_of(small_model, mode=mode, steps=3, task=task), tmp_path / "shuffled")
    assert [list(row.longest) for row in shuffled.rows][:3] == asked[:3], "nothing is known in the first epoch"
    known = straight.rows[:3] if mode == "sync" else straight.rows[:2]
    lengths = {question: tokens for row in known for question, tokens in row.longest.items()}
    average = sum(lengths.values()) / len(lengths)
    steps = sorted(sorted(lengths.get(question, average) for question in step) for step in asked[3:6])
    assert all(before[-1] <= after[0] for before, after in pairwise(steps)), "the runs of a sorted epoch"


class LastAhead(StandIn):
    """Takes the weights of the first step once a group of the third step has ended under those before them."""

    def __init__(self, model):
        super().__init__(model)
        self.has_ended = threading.Event()

    def rollout_blocking(self, batch):
        for group in super().rollout_blocking(batch):
            yield group
            if batch.step == 2:  # the group has been taken up
                self.has_ended.set()

    def send_weights_blocking(self, version, tensors):
        assert version == 1 or self.has_ended.wait(120)
        return super().send_weights_blocking(version, tensors)


def test_bounded_stays_within_its_staleness(small_model, tmp_path):
    ahead = LastAhead(small_model)
    rows, service = trained(small_model, tmp_path / "run", ahead, mode="bounded", max_staleness=2)
    assert all(row.staleness.max <= 2 for row in rows)
    assert sorted(batch.step for batch in service.batches) == [0, 1, 2]
    assert rows[2].staleness.max >= 1, "all three steps are admitted under the first weights"
    parts = [(row.staleness.in_flight, row.staleness.in_queue) for row in rows]
    assert [sum(both) for both in parts] == pytest.approx([row.staleness.mean for row in rows])
    assert parts[0] == (0.0, 0.0) and parts[2][1] > 0, "groups that end under the first weights wait for their step"
    assert {batch.weights_version for batch in service.batches} == {None}


def test_groups_are_taken_as_they_end_and_a_stopped_run_trains_on_the_rest(small_model, tmp_path):
    def stop_after_three(text):
        if text.startswith("step 3/4"):
            raise KeyboardInterrupt

    config = config_of(small_model, mode="bounded_groups", groups=3, steps=4, checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", stop_after_three)
    outcome, service = run(config, tmp_path / "run")
    taken = [question for row in outcome.rows for question in row.taken]
    assert sorted(taken) == [(step, place) for step in range(4) for place in range(3)]
    assert all(len(row.taken) == len(row.longest) == 3 and row.samples == 12 for row in outcome.rows)
    assert all(row.staleness.max <= 2 for row in outcome.rows)
    parts = [row.staleness.in_flight + row.staleness.in_queue for row in outcome.rows]
    assert parts == pytest.approx([row.staleness.mean for row in outcome.rows])
    stored = [(group.step, int(group.prompt_id)) for group in stored_groups(tmp_path / "run" / "rollouts")]
    assert stored == taken and service.cancelled == []


@pytest.mark.parametrize("mode", ["overlap", "one_step_off", "bounded", "bounded_groups"])
def test_a_sample_without_an_answer_ends_the_run_with_its_reason(small_model, tmp_path, mode):
    class Failing(StandIn):
        def _sample(self, batch, group, index):
            failed = {"finish_reason": SampleEnd.FAILED, "error": "gave up after 5 attempts"}
            return super()._sample(batch, group, index).model_copy(update=failed if batch.step == 1 else {})

    with pytest.raises(Failed, match=r"prompt \d sample 0 has no answer: gave up after 5 attempts"):
        trained(small_model, tmp_path / "run", Failing(small_model), mode=mode)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("step-")])


@pytest.mark.parametrize(
    ("settings", "fault"),
    [({"scale_rewards": "batch"}, "group by group"), ({"num_iterations": 2}, "used once")],
)
def test_settings_over_all_groups_are_refused(small_model, tmp_path, settings, fault):
    with pytest.raises(ValidationError, match=fault):
        trained(small_model, tmp_path / "run", trl=settings)


@pytest.mark.parametrize(
    "loss_type", ["dapo", *(pytest.param(one, marks=pytest.mark.long) for one in ("grpo", "dr_grpo"))]
)
def test_the_loss_is_trls_own(small_model, tmp_path, loss_type):
    """One step with one batch of all groups, by TRL's trainer, gives the same weights to rounding."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tailrace.app.train.group_trainer import HandedOver
    from tailrace.app.train.question_order import QuestionOrder

    trl = {"loss_type": loss_type}
    rows, service = trained(small_model, tmp_path / "run", mode="sync", steps=1, trl=trl)
    (batch,) = service.batches
    groups = {group.prompt_id: group for group in StandIn(small_model).rollout_blocking(unconditional(batch))}
    samples = [sample for place in range(3) for sample in groups[str(place)].samples]
    lengths = iter([float(len(sample.text)) for sample in samples])

    class AllGroups(HandedOver):
        group = type("All", (), {"samples": samples})

    questions = QuestionOrder(read_task(TaskConfig(**TASK | {"held_out": 0})).train, 3, 0).of(0)
    trainer = GRPOTrainer(
        str(small_model),
        reward_funcs=lambda completions, **_: [next(lengths) for _ in completions],
        args=GRPOConfig(
            output_dir=str(tmp_path / "trl"), max_steps=1, num_generations=4, per_device_train_batch_size=12,
            max_completion_length=5, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            save_strategy="no", learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1,
            shuffle_dataset=False, vllm_importance_sampling_correction=False, **trl,
        ),
        train_dataset=Dataset.from_list([{"prompt": question.prompt} for question in questions]),
        processing_class=AutoTokenizer.from_pretrained(small_model),
    )  # fmt: skip
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, AllGroups(), -1
    trainer.train()
    logged = next(row for row in trainer.state.log_history if "loss" in row)
    assert rows[0].grad_norm > 1e-3
    assert rows[0].grad_norm == pytest.approx(logged["grad_norm"], rel=1e-4)
    assert rows[0].loss == pytest.approx(logged["loss"], abs=1e-5)


@pytest.mark.parametrize("samples_per_pass", [pytest.param(1, marks=pytest.mark.long), 3])
def test_passes_over_parts_of_a_group_give_its_gradient_and_the_same_bits_in_any_order(
    small_model, tmp_path, by_turns, samples_per_pass
):
    split = {"samples_per_pass": samples_per_pass, "max_held_gradients": 2}
    rows, _ = trained(small_model, tmp_path / "one", mode="sync", trainer=split)
    again, _ = trained(small_model, tmp_path / "two", Ordered(small_model, (2, 0, 1)), mode="overlap", trainer=split)
    assert certificate(rows) == certificate(again)
    assert rows[0].grad_norm == pytest.approx(by_turns[0][2], rel=1e-4)
    with pytest.raises(ValidationError, match="samples_per_pass"):
        trained(small_model, tmp_path / "three", trainer=split, trl={"loss_type": "grpo"})


def test_parts_have_no_columns_of_padding():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    inputs = {"completion_ids": mask * 7, "completion_mask": mask, "advantages": torch.tensor([1.0, 2.0, 3.0])}
    inputs |= {"prompt_ids": torch.ones(3, 3), "num_items_in_batch": torch.tensor(64.0)}
    first, second = parts(inputs, 2)
    assert first["completion_ids"].tolist() == [[7, 7, 7], [7, 7, 0]] and first["advantages"].tolist() == [2.0, 3.0]
    assert second["completion_mask"].tolist() == [[1]] and second["prompt_ids"].shape == (1, 3)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_weights_do_not_depend_on_the_number_of_workers(small_model, tmp_path, by_turns, workers):
    split = {"samples_per_pass": 1, "workers": workers}
    rows, _ = trained(small_model, tmp_path / "run", mode="overlap", trainer={"workers": workers})
    assert certificate(rows) == by_turns
    split_rows, _ = trained(small_model, tmp_path / "split", mode="sync", trainer=split)
    one, _ = trained(small_model, tmp_path / "one", mode="sync", trainer=split | {"workers": 2})
    assert certificate(split_rows) == certificate(one)


def test_groups_whose_answers_had_one_reward_are_counted_and_move_weights_as_before(small_model, tmp_path, monkeypatch):
    """By the optimizer's moments alone, as if the gradient of 0 had been computed."""
    task = TASK | {"held_out": 0, "reward": "reward_functions:same_for_some"}
    rows, _ = trained(small_model, tmp_path / "run", mode="sync", task=task)
    monkeypatch.setattr(GroupTrainer, "_has_no_gradient", lambda self, inputs: False)
    computed, _ = trained(small_model, tmp_path / "computed", mode="sync", task=task)
    assert certificate(rows) == certificate(computed)
    assert [row.groups_without_gradient for row in computed] == [0, 0, 0]
    assert 3 in [row.groups_without_gradient for row in rows[1:]] and rows[0].groups_without_gradient < 3
    assert len({row.weights_checksum for row in rows}) == 3


def test_a_loss_that_is_no_number_is_that_of_its_step_alone(small_model, tmp_path, by_turns, monkeypatch):
    own = GroupTrainer._gradient_of

    def without_number(self, model, inputs):
        found = own(self, model, inputs)
        return replace(found, loss=found.loss * math.nan) if self.state.global_step == 1 else found

    monkeypatch.setattr(GroupTrainer, "_gradient_of", without_number)
    rows, _ = trained(small_model, tmp_path / "run", mode="sync")
    assert math.isnan(rows[1].loss)
    assert certificate([rows[0], rows[2]]) == [by_turns[0], by_turns[2]]


def test_an_entropy_bonus_is_refused_where_it_would_be_scaled(small_model, tmp_path):
    with pytest.raises(BadInput, match="loss_type dapo divides by all tokens"):
        trained(small_model, tmp_path / "run", trl={"entropy_coef": 0.1})
    assert not [thread for thread in threading.enumerate() if thread.name == "replica-seconds"]
    rows, _ = trained(small_model, tmp_path / "grpo", steps=1, trl={"entropy_coef": 0.1, "loss_type": "grpo"})
    assert rows[0].grad_norm > 0
