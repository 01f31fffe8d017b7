"""An ordinary GRPO script of TRL, with one line added: `python examples/trl_grpo.py MODEL_FOLDER`.

Needs a running service of that model (`make serve`), RAY_AUTH_MODE=token and the extra `train`. Without the line that
calls `attach`, TRL generates by itself.
"""

import sys

import tailrace

client = tailrace.connect()

from datasets import Dataset  # noqa: E402 - `connect` comes before packages that load Ray
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

data = Dataset.from_list([{"prompt": f"Write the digit {digit}:", "digit": str(digit)} for digit in range(10)])


def has_digit(completions, digit, **_):
    return [float(wanted in text) for text, wanted in zip(completions, digit, strict=True)]


arguments = GRPOConfig(
    output_dir="out/trl",
    max_steps=2,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=16,
    bf16=False,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
)
trainer = GRPOTrainer(sys.argv[1], reward_funcs=has_digit, args=arguments, train_dataset=data)
tailrace.attach(trainer, client, weights_dir="out/trl/weights")
trainer.train()
