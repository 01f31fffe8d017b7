"""Tools of TRL's real `GRPOTrainer` through `attach`. Its answers are written here; the service is in this process.

The demo model's own chat template has no tools. Qwen 2.5's, which TRL knows how to read tool calls of, has the same
turn tokens, so it is put on the demo model's tokenizer.
"""

import pytest
from datasets import Dataset
from live.trainers.stand_in import StandIn
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template

from tailrace import attach

SAMPLES, TOKENS = 2, 80
CALL = '<tool_call>\n{"name": "product", "arguments": {"a": 6, "b": 7}}\n</tool_call><|im_end|>'


class Scripted(StandIn):
    """Sample 0 of a first turn calls the tool, sample 1 does not; later turns end with an answer."""

    def _sample(self, batch, group, index):
        later = "/" in group.prompt_id
        text = "It is 42.<|im_end|>" if later or index else CALL
        tokens = self.tokenizer(text)["input_ids"][: group.max_tokens]
        made = super()._sample(batch, group.model_copy(update={"max_tokens": 1}), index)
        update = {"token_ids": tuple(tokens), "text": text, "logprobs": (-1.0,) * len(tokens)}
        return made.model_copy(update=update)


@pytest.fixture
def called():
    return []


def tool_trainer(model, tmp_path, called, kind=GRPOTrainer):
    """A trainer for one step of two prompts. `called`: gets the arguments of each call of its tool."""

    def product(a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        called.append((a, b))
        return a * b

    def one_turn(completions, **_):
        return [float(len(completion) == 1) for completion in completions]

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen2_5_chat_template
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=1,
        per_device_train_batch_size=2 * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n} times 7?"}]} for n in range(4)])
    return kind(
        str(model), reward_funcs=one_turn, args=arguments, train_dataset=data,
        processing_class=tokenizer, tools=[product],
    )  # fmt: skip


def test_later_turns_are_called_after_their_sample_and_get_the_tokens_left(small_model, tmp_path, called):
    trainer, service = tool_trainer(small_model, tmp_path, called), Scripted(small_model)
    tokenizer = trainer.processing_class
    attach(trainer, service, tmp_path / "weights")
    trainer.train()

    assert called == [(6, 7), (6, 7)], "sample 0 of both prompts"
    first, second = service.batches
    assert [group.prompt_id for group in first.groups] == ["0.0", "0.1"]
    assert [(group.prompt_id, group.samples) for group in second.groups] == [("0.0/0", 1), ("0.1/0", 1)]
    for before, after in zip(first.groups, second.groups, strict=True):
        answer = tuple(tokenizer(CALL)["input_ids"])
        assert after.token_ids[: len(before.token_ids) + len(answer)] == before.token_ids + answer
        result = tokenizer.decode(after.token_ids[len(before.token_ids) + len(answer) :])
        assert "<tool_response>\n42\n</tool_response>" in result and result.endswith("<|im_start|>assistant\n")
        assert after.max_tokens == TOKENS - (len(after.token_ids) - len(before.token_ids)) > 0
    (row,) = [row for row in trainer.state.log_history if "tools/call_frequency" in row]
    assert (row["tools/call_frequency"], row["tools/failure_frequency"]) == (0.5, 0)
    assert row["rewards/one_turn/mean"] == 0.5
