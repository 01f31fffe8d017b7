"""Worker and weight transfer for TRL's real `AsyncGRPOTrainer`. A model in this process answers for the service."""

import asyncio
import itertools
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import Dataset
from live.trainers.async_trainer import EXAMPLES, SAMPLES, TOKENS, arguments, logged, watched
from live.trainers.stand_in import StandIn
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop

from tailrace import AsyncRollouts, AsyncWeights
from tailrace.app.cluster import service as service_of
from tailrace.app.config import DEFAULT_CONFIG, ServeFile
from tailrace.app.errors import BadInput, Failed
from tailrace.app.trl import unused_routes
from tailrace.app.trl.group_rewards import rewards_of
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.policies.protocol.actions import SampleEnd

pytestmark = pytest.mark.usefixtures("on_a_cpu")

PROMPTS = [f"Count to {number}:" for number in range(6)]


class AsyncStandIn(StandIn):
    """The coroutines of a client over the same model. `slow`: prompt ids that are answered `slow_s` later than the
    others. `begun`: the version of the weights at the begin of each batch.
    """

    def __init__(self, model, slow=(), slow_s=0.3):
        super().__init__(model)
        self.slow_s = slow_s
        self.slow, self.cancelled, self.rewards, self.begun = set(slow), [], [], []

    async def rollout(self, batch):
        self.begun.append(self.version)
        try:
            await asyncio.sleep(self.slow_s if batch.groups[0].prompt_id in self.slow else 0)
            for group in await asyncio.to_thread(lambda: list(self.rollout_blocking(batch))):
                yield group
        except asyncio.CancelledError:
            self.cancelled.append(batch.batch_id)
            raise

    async def record_rewards(self, group, rewards) -> None:
        self.rewards.append((group.prompt_id, rewards))


def letters(completions, place, **_):
    assert len(set(place)) == 1, "the rows of one prompt"
    return [float(len(set(text))) for text in completions]


def trainer_of(model, tmp_path, service, rewards=letters, weights_dir=None, **settings):
    args, tokenizer = arguments(tmp_path, **settings), AutoTokenizer.from_pretrained(model)
    data = Dataset.from_list([{"prompt": prompt, "place": place} for place, prompt in enumerate(PROMPTS)])
    weights = AsyncWeights(service, weights_dir)
    worker = AsyncRollouts(
        service, weights, args=args, train_dataset=data, reward_funcs=rewards, processing_class=tokenizer
    )
    return AsyncGRPOTrainer(
        str(model), args=args, train_dataset=data, processing_class=tokenizer,
        rollout_worker=worker, weight_transfer=weights,
    )  # fmt: skip


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_groups_come_whole_in_order_and_within_the_staleness(small_model, tmp_path, max_staleness):
    service = AsyncStandIn(small_model, slow={"0", "3"})
    trainer = trainer_of(small_model, tmp_path, service, max_staleness=max_staleness)
    drawn = watched(trainer)
    trainer.train()
    assert service.updates == [(version, "memory") for version in (1, 2, 3, 4)], "before the first step, and after each"
    numbers = [(group, len(list(samples))) for group, samples in itertools.groupby(s.group_id for s, _ in drawn)]
    assert numbers[:6] == [(number, SAMPLES) for number in range(6)]
    assert all(0 <= version - sample.model_version <= max_staleness for sample, version in drawn)
    assert all(len({s.model_version for s, _ in drawn if s.group_id == number}) == 1 for number in range(6))
    if max_staleness < 2:  # else all samples of three steps may have the first weights
        assert {sample.model_version for sample, _ in drawn} != {1}, "later samples have later weights"
    assert not logged(trainer, "sample/dropped_stale_total")
    taken = len(service.batches)
    assert taken <= 2 * (max(1, max_staleness) + 3 + 1), "no more groups than the rule allows after three steps"
    assert service.begun.count(1) <= 2 * max(2, max_staleness + 1), "or what the trainer draws ahead"
    steps = {batch.groups[0].prompt_id: batch.step for batch in service.batches}
    assert steps == {str(number): number // 2 for number in range(taken)}
    ratios = logged(trainer, "ratio")
    assert len(ratios) == 3 and ratios[0] == pytest.approx(1, abs=1e-3), "the first step has its own weights' samples"
    assert ratios == pytest.approx([1, 1, 1], abs=0.2)
    assert len(logged(trainer, "rewards/letters")) == 3 and logged(trainer, "completions/mean_length")
    assert not trainer.rollout_worker._thread.is_alive()


def test_samples_have_the_services_logprobs_under_the_trainers_numbers(small_model, tmp_path):
    service = AsyncStandIn(small_model)
    service.version = 5  # an earlier run has left these weights
    trainer = trainer_of(small_model, tmp_path, service, max_steps=1, weights_dir=tmp_path / "weights")
    drawn = watched(trainer)
    trainer.train()
    assert [version for version, _ in service.updates] == [6, 7]
    assert all(Path(source).parent == tmp_path / "weights" for _, source in service.updates)
    assert {sample.model_version for sample, _ in drawn} <= {1, 2}
    for sample, _ in drawn:
        answer = sample.completion_mask.astype(bool)
        assert not sample.old_log_probs[~answer].any() and (sample.old_log_probs[answer] < 0).all()
        assert 1 <= answer.sum() <= TOKENS and not answer[: len(answer) - answer.sum()].any()
    assert set(dict(service.rewards)["0"]) == set(range(SAMPLES))


def test_token_budgets_do_not_starve_the_trainer(small_model, tmp_path):
    """A row of 200 tokens holds more samples than a step was taken to have."""
    trainer = trainer_of(small_model, tmp_path, AsyncStandIn(small_model), token_budget=200, max_staleness=0)
    trainer.train()
    assert trainer.state.global_step == 3


def test_rewards_and_advantages_are_those_of_trls_own_worker():
    values = [[1.0, None, 0.5, None, 3.0], [0.0, 2.0, None, None, 1.0]]

    def first(**_):
        return values[0]

    async def second(**_):
        return values[1]

    found = asyncio.run(rewards_of([first, second], 5, {"completions": [""] * 5}))
    loop = object.__new__(_AsyncRolloutLoop)  # its constructor makes a client of a vLLM server
    loop.reward_funcs, loop.reward_func_names, loop._env_reward_types = [first, second], ["first", "second"], []
    group = RolloutGroup(
        prompts=[[]] * 5, reward_kwargs={}, completions=[[]] * 5, completions_ids=[[1]] * 5,
        completions_sequences=[[TrainingSequence([1], [1], [0.0], "one")]] * 5, tool_call_counts=[0] * 5,
        tool_failure_counts=[0] * 5, model_version=1, group_id=0, env_rewards=[], rollout_rewards=[],
    )  # fmt: skip
    wanted = asyncio.run(loop._score_group(group))
    np.testing.assert_array_equal(found.advantages, [sample.advantage for sample in wanted])
    for mine, theirs in zip(found.metrics(), wanted, strict=True):
        np.testing.assert_equal(mine, theirs.metrics)


def test_a_reward_that_raises_ends_training_with_its_reason_and_cancels_what_is_in_flight(small_model, tmp_path):
    def broken(completions, **_):
        raise ZeroDivisionError("no letters")

    service = AsyncStandIn(small_model, slow={"2", "3"}, slow_s=3600)
    trainer = trainer_of(small_model, tmp_path, service, rewards=broken)
    with pytest.raises(Failed, match=r"^the reward function broken has failed: ZeroDivisionError: no letters$"):
        trainer.train()
    assert not trainer.rollout_worker._thread.is_alive()
    assert service.cancelled


def test_a_failed_sample_ends_training_with_its_reason(small_model, tmp_path):
    class Failing(AsyncStandIn):
        def _sample(self, batch, group, index):
            update = {"finish_reason": SampleEnd.FAILED, "error": "gave up after 5 attempts"}
            return super()._sample(batch, group, index).model_copy(update=update)

    with pytest.raises(Failed, match="sample 0 has no answer: gave up after 5 attempts"):
        trainer_of(small_model, tmp_path, Failing(small_model)).train()


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2"),
        ({"token_budget": None}, "token_budget is not set"),
        ({"max_inflight_tasks": 3}, "max_inflight_tasks is 3, less than the 4 samples"),
        ({"queue_maxsize": 2}, "queue_maxsize is 2, less than the 4 samples"),
    ],
)
def test_settings_that_would_not_be_honoured_are_refused(small_model, tmp_path, settings, fault):
    with pytest.raises(BadInput, match=fault):
        trainer_of(small_model, tmp_path, AsyncStandIn(small_model), **settings)


class TellsRoutes(AsyncStandIn):
    """Samples have routed experts."""

    def _sample(self, batch, group, index):
        drawn = super()._sample(batch, group, index)
        rows = len(group.token_ids) + len(drawn.token_ids) - 1
        return drawn.model_copy(update={"routed_experts": RoutedExperts(np.zeros((rows, 1, 1), np.uint8))})


def test_routes_are_not_replayed_and_a_warning_says_so_once(small_model, tmp_path, caplog):
    unused_routes._warn.cache_clear()
    trainer_of(small_model, tmp_path, TellsRoutes(small_model)).train()
    assert [one for one in caplog.messages if "AsyncGRPOTrainer does not replay" in one] == [
        "AsyncGRPOTrainer does not replay the engines' routed experts: its routers choose for themselves"
    ]


@pytest.mark.long
def test_the_example_script_trains_on_a_real_service(tiny_model, tmp_path, monkeypatch):
    script = EXAMPLES / "trl_async_grpo.py"
    file = yaml.safe_load(DEFAULT_CONFIG.read_text())
    file["applications"][0]["args"]["engine"] |= {"model": str(tiny_model), "kv_cache_gib": 0.5, "max_model_len": 1024}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), str(tiny_model)])
    with service_of(ServeFile.model_validate(file), None) as client:
        names = runpy.run_path(str(script), run_name="__main__")
        assert client.status_blocking().weights_version == 4
    ratios = logged(names["trainer"], "ratio")
    assert len(ratios) == 3 and ratios == pytest.approx([1, 1, 1], abs=1e-2)
    assert max(logged(names["trainer"], "sample/staleness_max")) <= 1
