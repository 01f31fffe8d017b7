"""TRL's asynchronous trainer on an agent's trajectories: `python examples/trl_trajectories.py ADDRESS TOKEN MODEL`.

ADDRESS, TOKEN: of a gateway on this machine, and a trainer's token: http://127.0.0.1:8000 (docs/agents.md). MODEL: the
folder of the model that it serves. Needs the extras `cpu` or `gpu`, and `train`; no Ray is started here. Without a GPU
it runs with two patches of TRL, which `trl_on_a_cpu.py` has and explains.
"""

import sys

import openai
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import tailrace
from tailrace.app.weights.over_http import HttpWeights
from tailrace.http import Client


async def agent(base_url: str, api_key: str, question: str) -> list[str]:
    """Knows nothing of this service, and may be any program that calls OpenAI's or Anthropic's API. It keeps its own
    conversation, sets a temperature of its own, and asks for a title on the side, as coding agents do.
    """
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def answer(messages):
            asked = client.chat.completions.create(model="any", messages=messages, max_tokens=12, temperature=0.0)
            return (await asked).choices[0].message

        messages = [{"role": "user", "content": question}]
        messages.append(await answer(messages))
        await answer([{"role": "system", "content": "Answer with a title."}, *messages[:1]])
        messages.append({"role": "user", "content": "Once more."})
        messages.append(await answer(messages))
        return [messages[place].content or "" for place in (1, 3)]


async def play(trajectory, task) -> float:
    """Runs the agent of one trajectory. Returns its reward: the more different letters, the better."""
    answers = await agent(trajectory.base_url, trajectory.api_key, f"Write the digit {task['digit']}.")
    return float(len(set("".join(answers))))


def main(address: str, token: str, model: str, **settings) -> AsyncGRPOTrainer:
    """Trains three steps. `settings`: of AsyncGRPOConfig, beside those below."""
    on_a_cpu = not torch.cuda.is_available()
    if on_a_cpu:
        import trl_on_a_cpu

        trl_on_a_cpu.patch()
    tasks = Dataset.from_list([{"digit": str(digit)} for digit in range(10)])
    arguments = AsyncGRPOConfig(
        output_dir="out/trl-trajectories",
        max_steps=3,
        per_device_train_batch_size=16,  # rows: two groups of four trajectories, each with an aside
        num_generations=4,
        max_staleness=1,
        token_budget=0,  # micro-batches by rows
        bf16=not on_a_cpu,
        use_cpu=on_a_cpu,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        **settings,
    )
    client = Client(address, token)
    weights = tailrace.AsyncWeights(HttpWeights(address.replace("://", f"://trainer:{token}@")))
    worker = tailrace.AsyncTrajectories(
        client,
        weights,
        play=play,
        args=arguments,
        train_dataset=tasks,
        processing_class=AutoTokenizer.from_pretrained(model),
        limits={"turns": 8, "seconds": 600},
    )
    trainer = AsyncGRPOTrainer(
        model, args=arguments, train_dataset=tasks, rollout_worker=worker, weight_transfer=weights
    )
    trainer.train()
    client.close()
    return trainer


if __name__ == "__main__":
    for row in main(*sys.argv[1:]).state.log_history:
        if "ratio" in row:
            print("ratio", row["ratio"], "staleness", row["sample/staleness_max"])
