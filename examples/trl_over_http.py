"""TRL's asynchronous trainer with its own rollout worker, over HTTP: `python examples/trl_over_http.py ADDRESS MODEL`.

ADDRESS: of a gateway on this machine, with a trainer's token: http://trainer:TOKEN@127.0.0.1:8000 (docs/http.md).
MODEL: the folder of the model that it serves. Needs the extras `cpu` or `gpu`, and `train`; no Ray is started here.
Without a GPU it runs with two patches of TRL, which `trl_on_a_cpu.py` has and explains.
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import tailrace
from tailrace.app.weights.over_http import HttpWeights

ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}
"""The form of an answer in ChatML. TRL's worker knows that of a few models, and wants it of the others."""


def has_digit(completions, digit, **_):
    return [float(wanted in text[-1]["content"]) for text, wanted in zip(completions, digit, strict=True)]


def main(address: str, model: str) -> AsyncGRPOTrainer:
    on_a_cpu = not torch.cuda.is_available()
    if on_a_cpu:
        import trl_on_a_cpu

        trl_on_a_cpu.patch()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = ANSWER
    prompts = [[{"role": "user", "content": f"Write the digit {digit}."}] for digit in range(10)]
    arguments = AsyncGRPOConfig(
        output_dir="out/trl-http",
        vllm_server_base_url=address,
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
    trainer = AsyncGRPOTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompts[n], "digit": str(n)} for n in range(10)]),
        reward_funcs=has_digit,
        processing_class=tokenizer,
        weight_transfer=tailrace.AsyncWeights(HttpWeights(address)),  # TRL's own goes by NCCL alone
    )
    trainer.train()
    return trainer


if __name__ == "__main__":  # the worker is a process that imports this file
    for row in main(*sys.argv[1:]).state.log_history:
        if "ratio" in row:
            print("ratio", row["ratio"], "staleness", row["sample/staleness_max"])
