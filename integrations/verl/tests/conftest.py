"""A Ray cluster with verl's processes: once with a stand-in for the service, once with a real one of a tiny model.

The real one is started by `tailrace serve` of the main environment; its processes and verl's share one Ray cluster,
each with its own Python environment.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["RAY_AUTH_MODE"] = "token"  # before Ray is imported; a service refuses to start without
os.environ.update({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"})  # loopback alone
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # of verl's actors, for the stand-in

ROOT = Path(__file__).resolve().parents[3]
MAIN = ROOT / ".venv/bin/python"
WORDS = 500
SHAPE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPE |= {"vocab_size": WORDS, "max_position_embeddings": 4096, "eos_token_id": 2}
ROUTES = {"enable_return_routed_experts": True}
TEMPLATE = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="session", autouse=True)
def token():
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled

    ensure_token_if_auth_enabled(create_token_if_missing=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Folder of a model of two layers with random weights and a tokenizer of 500 words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **SHAPE)).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixture(tmp_path_factory) -> Path:
    """Folder of a mixture of experts, with the same tokenizer. The middle one of its layers has none."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("experts") / "model"
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]}
    torch.manual_seed(0)
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=3, head_dim=64, **experts, **SHAPE))
    for name, weight in made.named_parameters():
        if ".mlp.experts." in name:  # else the answer hardly depends on the choice
            torch.nn.init.normal_(weight, std=0.3)
    made.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<a>": 3} | {f"w{i}": i for i in range(4, WORDS)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(" ", "removed")  # verl wants a token for the end of a line of a Qwen model
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session", params=["stand_in", pytest.param("service", marks=pytest.mark.live)])
def cluster(request, model, tmp_path_factory):
    """Connects this process; yields the class of the server. `mixture`: a service whose engines keep routes."""
    import ray
    from stand_in import SLOTS, StandInServer
    from tailrace_verl.server import TailraceServer

    from tailrace.deployments.staging.slots import Slots, service_name

    started = None
    environment = {"py_executable": sys.executable, "env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    if request.param == "stand_in":
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    else:
        port = free_port()
        engine = {"model": str(model)}
        if request.param == "mixture":
            engine = {"model": str(request.getfixturevalue("mixture")), "vllm_args": ROUTES}
        started = _serve(engine, port, tmp_path_factory.mktemp("served"))
        ray.init(address=f"127.0.0.1:{port}", runtime_env=environment, log_to_driver=False)
    slots = Slots(service_name("tailrace", ray.get_runtime_context().gcs_address))
    try:
        yield StandInServer if request.param == "stand_in" else TailraceServer
    finally:
        ray.shutdown()
        Slots(SLOTS).remove()
        if started is not None:
            started.send_signal(signal.SIGTERM)
            assert started.wait(90) == 0
            assert not list(slots.root.glob(f"tailrace-{slots.service}*")), "memory of weights is left"


def _serve(engine: dict, port: int, folder: Path) -> subprocess.Popen:
    import yaml

    file = yaml.safe_load((ROOT / "serve.yaml").read_text())
    (application,) = file["applications"]
    application["args"]["engine"] |= engine
    application["args"]["replicas"] = 1
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump(file))
    command = (str(MAIN), "-m", "tailrace", "serve", "--config", str(config), "--port", str(port))
    resources = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 64, "GPU": 2}'}  # for verl's workers; its trainer counts GPUs
    started = subprocess.Popen(
        (*command, "--dashboard-port", str(free_port())),
        cwd=ROOT,
        env=os.environ | resources,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = started.stdout.readline()
    assert f"127.0.0.1:{port}" in said, said
    return started


@pytest.fixture(scope="session")
def config(model):
    """verl's own configuration file, with the keys that docs/verl.md names."""
    import verl
    from hydra import compose, initialize_config_dir

    keys = {
        "name": "tailrace",
        "tensor_model_parallel_size": 1,
        "nnodes": 1,
        "n_gpus_per_node": 1,
        "n": 4,
        "prompt_length": 16,
        "response_length": 24,
        "calculate_log_probs": True,
        "checkpoint_engine.backend": "tailrace",
        "agent.default_agent_loop": "tailrace_agent",
    }
    changes = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in keys.items()]
    changes += [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.hybrid_engine=False"]
    changes += ["trainer.v1.trainer_mode=separate_async"]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose("ppo_trainer", changes)


@pytest.fixture(scope="session")
def manager(cluster, config):
    """verl's manager of servers, with one replica of the plug-in."""
    from tailrace_verl.replica import TailraceReplica
    from verl.workers.rollout.llm_server import LLMServerManager

    TailraceReplica.server_class = cluster
    return LLMServerManager.create(config)
