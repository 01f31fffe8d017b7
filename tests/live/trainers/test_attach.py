"""`attach` to a `trl.GRPOTrainer`, against the real package. A model in this process answers for the service."""

import pytest
from datasets import Dataset
from live.trainers.stand_in import StandIn
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import tailrace
from tailrace import attach
from tailrace.app.errors import BadInput
from tailrace.policies.protocol.actions import SampleEnd

PROMPTS = ["Count to three:", "Name a colour:", "Say a word:"]
SAMPLES, TOKENS = 4, 6


def digits(completions, **_):
    return [float(len(set(text))) for text in completions]


def trainer_of(model, tmp_path, rewards=digits, rollout_func=None, kind=GRPOTrainer, **settings):
    usual = {"max_steps": 3, "learning_rate": 1e-3, "loss_type": "grpo", "max_completion_length": TOKENS}
    usual |= {"per_device_train_batch_size": 2 * SAMPLES, "gradient_checkpointing": False, "bf16": False}
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        num_generations=SAMPLES,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        seed=7,
        **(usual | settings),
    )
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 4])
    return kind(
        str(model),
        reward_funcs=rewards,
        args=arguments,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=rollout_func,
    )


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def test_an_attached_trainer_trains_on_samples_of_its_present_weights(small_model, tmp_path):
    service, trainer = StandIn(small_model), trainer_of(small_model, tmp_path)
    attach(trainer, service, tmp_path / "weights")
    trainer.train()
    assert [version for version, _ in service.updates] == [1, 2, 3]
    assert [(batch.step, batch.seed, batch.weights_version) for batch in service.batches] == [
        (0, 7, 1),
        (1, 7, 2),
        (2, 7, 3),
    ]
    assert all(len(batch.groups) == 2 and batch.groups[0].samples == SAMPLES for batch in service.batches)
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1, 1, 1], abs=1e-3)
    assert logged(trainer, "sampling/sampling_logp_difference/max") == pytest.approx([0, 0, 0], abs=1e-3)


def test_without_a_folder_weights_go_through_memory_and_train_alike(small_model, tmp_path):
    found = []
    for weights_dir in (None, tmp_path / "weights"):
        service, trainer = StandIn(small_model), trainer_of(small_model, tmp_path / str(len(found)))
        attach(trainer, service, weights_dir)
        trainer.train()
        assert [source == "memory" for _, source in service.updates] == [weights_dir is None] * 3
        found.append(weights(trainer))
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


def test_two_runs_have_the_same_weights_to_the_bit(small_model, tmp_path):
    found = []
    for name in ("one", "two"):
        trainer = trainer_of(small_model, tmp_path / name)
        attach(trainer, StandIn(small_model), tmp_path / name / "weights")
        trainer.train()
        found.append(weights(trainer))
    start = weights(trainer_of(small_model, tmp_path / "start"))
    assert all(found[0][name].equal(found[1][name]) for name in found[0])
    assert not all(found[0][name].equal(start[name]) for name in start)


def test_rewards_can_tell_the_version_of_their_samples_and_which_were_cut(small_model, tmp_path):
    seen = []

    def rewards(completions, completion_ids, **_):
        stopped = [ids[-1] == service.eos for ids in completion_ids]
        seen.append((rollout.weights_version, stopped, [len(ids) for ids in completion_ids]))
        return digits(completions)

    service, trainer = StandIn(small_model), trainer_of(small_model, tmp_path, rewards, max_steps=2)
    rollout = attach(trainer, service, tmp_path / "weights")
    assert rollout.weights_version is None
    trainer.train()
    assert [version for version, _, _ in seen] == [1, 2]
    for _, stopped, lengths in seen:
        assert len(stopped) == 2 * SAMPLES
        assert all(length == TOKENS for length, ended in zip(lengths, stopped, strict=True) if not ended)


def test_a_trainer_with_a_rollout_function_of_its_own_is_refused_and_ours_is_gone(small_model, tmp_path):
    trainer = trainer_of(small_model, tmp_path, rollout_func=lambda prompts, trainer: {})
    with pytest.raises(BadInput, match="the trainer has a rollout_func; it would be called in place of the service"):
        attach(trainer, StandIn(small_model))
    with pytest.raises(AttributeError, match=r"write tailrace\.attach\(trainer, client\) instead"):
        tailrace.rollout_function  # noqa: B018 - the name itself is the test


def test_evaluation_has_keys_of_its_own(small_model, tmp_path):
    service, trainer = StandIn(small_model), trainer_of(small_model, tmp_path, max_steps=1)
    attach(trainer, service, tmp_path / "weights")
    trainer.train()
    trainer.evaluate(Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]))
    steps = [batch.step for batch in service.batches]
    assert steps[0] == 0 and set(steps[1:]) == {(1 << 40) + 1}


def test_a_failed_sample_ends_the_step_with_its_reason(small_model, tmp_path):
    class Failing(StandIn):
        def _sample(self, batch, group, index):
            update = {"finish_reason": SampleEnd.FAILED, "error": "gave up after 5 attempts"}
            return super()._sample(batch, group, index).model_copy(update=update)

    trainer = trainer_of(small_model, tmp_path)
    attach(trainer, Failing(small_model), tmp_path / "weights")
    with pytest.raises(Exception, match=r"sample 0 has no answer: gave up after 5 attempts"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2"),
        ({"generation_kwargs": {"typical_p": 0.5}}, "typical_p"),
    ],
)
def test_settings_that_would_not_be_honoured_are_refused(small_model, tmp_path, settings, fault):
    with pytest.raises(BadInput, match=fault):
        attach(trainer_of(small_model, tmp_path, **settings), StandIn(small_model), tmp_path / "weights")
