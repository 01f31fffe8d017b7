"""TRL's asynchronous trainer on a service: `python examples/trl_async_grpo.py MODEL_FOLDER`.

Needs a running service of that model (`make serve`), RAY_AUTH_MODE=token and the extra `train`. Without a GPU it runs
with two patches of TRL, which `trl_on_a_cpu.py` has and explains.
"""

import sys

import tailrace

client = tailrace.connect()

import torch  # noqa: E402 - `connect` comes before packages that load Ray
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: E402

on_a_cpu = not torch.cuda.is_available()
if on_a_cpu:
    import trl_on_a_cpu

    trl_on_a_cpu.patch()

data = Dataset.from_list([{"prompt": f"Write the digit {digit}:", "digit": str(digit)} for digit in range(10)])


def has_digit(completions, digit, **_):
    return [float(wanted in text) for text, wanted in zip(completions, digit, strict=True)]


arguments = AsyncGRPOConfig(
    output_dir="out/trl-async",
    max_steps=3,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=16,
    max_staleness=1,
    token_budget=0,  # micro-batches by samples
    bf16=not on_a_cpu,
    use_cpu=on_a_cpu,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
)
weights = tailrace.AsyncWeights(client)
worker = tailrace.AsyncRollouts(
    client,
    weights,
    args=arguments,
    train_dataset=data,
    reward_funcs=has_digit,
    processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
)
trainer = AsyncGRPOTrainer(
    sys.argv[1], args=arguments, train_dataset=data, rollout_worker=worker, weight_transfer=weights
)
trainer.train()
