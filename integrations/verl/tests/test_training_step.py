"""verl's own trainer, `verl.trainer.main_ppo`, on a CPU: three steps on samples of a service, by one rank and two."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas
import pytest
import ray
import torch

import tailrace
from tailrace.deployments.staging.held import checksum_of

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": str(HERE),
    "VERL_USE_EXTERNAL_MODULES": "verl_on_a_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_LOGGING_LEVEL": "WARNING",  # docs/verl.md
}
STEPS = 3
TIED = "lm_head.weight"
KEEPER = "ray::SlotKeeper"
"""Title of the process that keeps the node's slots of weights. It ends with the service, not with the trainer."""
SAME = 1e-6
"""Maximum difference of a token's probability under the same weights; a step of the optimizer changes it by more."""


def keys(model: Path, folder: Path, address: str, ranks: int, ahead: int) -> list[str]:
    """Those that docs/verl.md names, and sizes for a CPU. `ahead`: batches that are generated before their step."""
    environment = ", ".join(f"{name}: {value}" for name, value in ENVIRONMENT.items())
    rollout = {
        "name": "tailrace", "tensor_model_parallel_size": 1, "nnodes": 1, "n_gpus_per_node": 1, "n": 4,
        "prompt_length": 16, "response_length": 24, "calculate_log_probs": True, "log_prob_micro_batch_size_per_gpu": 4,
        "checkpoint_engine.backend": "tailrace", "agent.default_agent_loop": "tailrace_agent", "agent.num_workers": 1,
    }  # fmt: skip
    actor = {
        "strategy": "fsdp2", "ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4, "optim.lr": 1e-3,
        "use_torch_compile": False, "fsdp_config.use_torch_compile": False, "use_kl_loss": False,
        "checkpoint.save_contents": "[model]",
    }  # fmt: skip
    data = {
        "train_files": folder / "train.parquet", "val_files": folder / "train.parquet", "train_batch_size": 4,
        "dataloader_num_workers": 0, "max_prompt_length": 16, "max_response_length": 24,
    }  # fmt: skip
    trainer = {
        "v1.trainer_mode": "separate_async", "v1.separate_async.parameter_sync_step": 1,
        "v1.separate_async.num_warmup_batches": ahead, "n_gpus_per_node": ranks, "nnodes": 1, "device": "cpu",
        "logger": "[console]", "total_training_steps": STEPS, "val_before_train": False, "test_freq": -1,
        "save_freq": STEPS, "default_local_dir": folder / "checkpoints",
    }  # fmt: skip
    return [
        *(f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()),
        *(f"actor_rollout_ref.actor.{key}={value}" for key, value in actor.items()),
        *(f"data.{key}={value}" for key, value in data.items()),
        *(f"trainer.{key}={value}" for key, value in trainer.items()),
        "actor_rollout_ref.hybrid_engine=False",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32}",  # as the engine
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={HERE / 'reward_of_words.py'}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"+ray_kwargs.ray_init.address={address}",
        f"+ray_kwargs.ray_init.runtime_env.py_executable={sys.executable}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars={{{environment}}}",
    ]


def write_prompts(folder: Path) -> None:
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": f"w{number} w{number + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for number in range(10, 42)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")


def train(folder: Path, given: list[str]) -> tuple[list[dict[str, str]], set[int]]:
    """Runs the trainer to its end. Returns what it has logged of each step, and the processes that it ran in."""
    before, ran = of_verl(), set()
    with (folder / "said").open("w+") as said:
        command = (sys.executable, "-m", "verl.trainer.main_ppo", *given)
        running = subprocess.Popen(command, cwd=folder, env=os.environ | ENVIRONMENT, stdout=said, stderr=said)
        try:
            until_s = time.monotonic() + 500
            while running.poll() is None and time.monotonic() < until_s:
                ran |= of_verl() - before
                time.sleep(1)
        finally:
            running.kill()
        said.seek(0)
        text = said.read()
    assert running.wait() == 0, text[-6000:]
    logged = [dict(re.findall(r"(\S+):(-?[\d.e+-]+|np\.\w+\([\d.]+\))", line)) for line in text.splitlines()]
    return [row for row in logged if "training/global_step" in row], ran


def of_verl() -> set[int]:
    """Returns the processes that have loaded a library of verl's environment."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            if f"{sys.prefix}/" in maps.read_text():
                found.add(int(maps.parent.name))
    return found


def left(processes: set[int]) -> list[str]:
    """Returns the titles of those that live on, but for the keeper. Waits first: Ray ends a job's workers after it."""
    until_s = time.monotonic() + 60
    while True:
        found = [title(process) for process in processes & of_verl()]
        found = [each for each in found if each and not each.startswith(KEEPER)]
        if not found or time.monotonic() > until_s:
            return found
        time.sleep(1)


def title(process: int) -> str:
    """Returns the process's title, empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")[0]
    return ""


def shards(folder: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Returns what each rank of the trainer has saved of its model after the last step, without the tied head."""
    saved = folder / f"checkpoints/global_step_{STEPS}/actor"
    loaded = [torch.load(saved / f"model_world_size_{ranks}_rank_{i}.pt", weights_only=False) for i in range(ranks)]
    return [{name: part.to_local() for name, part in shard.items() if name != TIED} for shard in loaded]


@pytest.mark.live
@pytest.mark.parametrize(("ranks", "ahead"), [(1, 1), (2, 0)])
@pytest.mark.parametrize("cluster", ["service"], indirect=True)
def test_verls_own_trainer_trains_on_samples_of_the_weights_that_it_published(cluster, model, tmp_path, ranks, ahead):
    write_prompts(tmp_path)
    client = tailrace.connect()
    before = client.status_blocking().weights_version
    address = ray.get_runtime_context().gcs_address
    steps, processes = train(tmp_path, keys(model, tmp_path, address, ranks, ahead))
    assert [int(row["training/global_step"]) for row in steps] == [1, 2, 3]
    assert all(float(row["actor/grad_norm"]) > 0 for row in steps)
    assert len(processes) > ranks and not left(processes)

    versions = [int(row["tailrace/weights_version"]) for row in steps]
    assert versions == [before + 2, before + 3, before + 4], "before the first step, and after each"
    for step, row in enumerate(steps):
        age = f"np.int64({min(ahead, step)})"
        seen = {row[f"training/off_policy/trajectory_staleness/{which}"] for which in ("min", "max")}
        assert seen == {age}, "each sample has the weights of the step before, or of one earlier if it is made ahead"
        differs = float(row["training/rollout_probs_diff_max"])
        assert (differs < SAME) == (age == "np.int64(0)"), "the trainer's weights compute the service's logprobs"

    parts = shards(tmp_path, ranks)
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    sizes = {name: tensor.nbytes for name, tensor in whole.items()}
    assert all(sum(part[name].nbytes for name in sizes) * ranks == sum(sizes.values()) for part in parts), "sharded"
    for row in steps:
        sent = [int(row[f"tailrace/published_bytes/rank_{rank}"]) for rank in range(ranks)]
        assert sum(sent) == sum(sizes.values()) and max(sent) - min(sent) <= max(sizes.values()) < sum(sent)
    held = client.check_weights_blocking()
    assert held.version == versions[-1] and not held.unlike and not held.problems
    assert held.checksums == {name: checksum_of(name, tensor) for name, tensor in whole.items()}
