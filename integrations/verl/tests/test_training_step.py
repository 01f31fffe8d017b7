"""verl's own trainer, `verl.trainer.main_ppo`, on a CPU: three steps on samples of a real service."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import ray

import tailrace

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": str(HERE),
    "VERL_USE_EXTERNAL_MODULES": "verl_on_a_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_LOGGING_LEVEL": "WARNING",  # docs/verl.md
}
STEPS = 3


def keys(model: Path, folder: Path, address: str) -> list[str]:
    """Those that docs/verl.md names, and sizes for a CPU."""
    environment = ", ".join(f"{name}: {value}" for name, value in ENVIRONMENT.items())
    rollout = {
        "name": "tailrace", "tensor_model_parallel_size": 1, "nnodes": 1, "n_gpus_per_node": 1, "n": 4,
        "prompt_length": 16, "response_length": 24, "calculate_log_probs": True, "log_prob_micro_batch_size_per_gpu": 4,
        "checkpoint_engine.backend": "tailrace", "agent.default_agent_loop": "tailrace_agent", "agent.num_workers": 1,
    }  # fmt: skip
    actor = {
        "strategy": "fsdp2", "ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4, "optim.lr": 1e-3,
        "use_torch_compile": False, "fsdp_config.use_torch_compile": False, "use_kl_loss": False,
    }  # fmt: skip
    data = {
        "train_files": folder / "train.parquet", "val_files": folder / "train.parquet", "train_batch_size": 4,
        "dataloader_num_workers": 0, "max_prompt_length": 16, "max_response_length": 24,
    }  # fmt: skip
    trainer = {
        "v1.trainer_mode": "separate_async", "v1.separate_async.parameter_sync_step": 1, "n_gpus_per_node": 1,
        "nnodes": 1, "device": "cpu", "logger": "[console]", "total_training_steps": STEPS, "val_before_train": False,
        "test_freq": -1, "save_freq": -1, "default_local_dir": folder / "checkpoints",
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
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={HERE / 'reward_of_words.py'}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"+ray_kwargs.ray_init.address={address}",
        f"+ray_kwargs.ray_init.runtime_env.py_executable={sys.executable}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars={{{environment}}}",
    ]


@pytest.mark.live
@pytest.mark.parametrize("cluster", ["service"], indirect=True)
def test_verls_own_trainer_trains_on_samples_of_the_weights_that_it_published(cluster, model, tmp_path):
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": f"w{number} w{number + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for number in range(10, 42)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    client = tailrace.connect()
    before = client.status_blocking().weights_version
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *keys(model, tmp_path, ray.get_runtime_context().gcs_address)],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    logged = [dict(re.findall(r"(\S+):(-?[\d.e+-]+|np\.\w+\([\d.]+\))", line)) for line in done.stdout.splitlines()]
    steps = [row for row in logged if "training/global_step" in row]
    assert [int(row["training/global_step"]) for row in steps] == [1, 2, 3]
    versions = [int(row["tailrace/weights_version"]) for row in steps]
    assert versions == [before + 2, before + 3, before + 4], "before the first step, and after each"
    assert client.status_blocking().weights_version == versions[-1]
    assert float(steps[0]["training/rollout_probs_diff_max"]) < 1e-3, "the trainer computes the service's logprobs"
    assert all(float(row["actor/grad_norm"]) > 0 for row in steps)
    ages = [row["training/off_policy/trajectory_staleness/max"] for row in steps]
    assert ages == ["np.int64(0)", "np.int64(1)", "np.int64(1)"], "later samples have later weights"
