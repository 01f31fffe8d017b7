"""verl's FSDP actor of one rank on a CPU, with our replay: its passes beside those of transformers, with routes that
are not the model's own.

A process of its own, since verl chooses its platform while it is imported. `python replaying.py MODEL STRATEGY PACKED`
writes a line of JSON, the greatest differences of log probabilities and gradients.
"""

import json
import os
import sys

os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_on_a_cpu", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}

import torch
from tensordict import TensorDict
from torch import distributed
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from tailrace.app.trl.route_replay import OWN, replayed_routes

LENGTHS = 9, 14, 7, 11
SDPA = {"attn_implementation": "sdpa"}
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
"""On a CPU verl's autocast would be for another device."""


def engine(folder: str, strategy: str, packed: bool):
    model = HFModelConfig(
        path=folder,
        external_lib="tailrace_verl.replaying_engine",
        use_remove_padding=packed,
        enable_gradient_checkpointing=True,
        override_config=SDPA,
    )
    parts = {"strategy": strategy, "mixed_precision": FP32, "use_torch_compile": False, "use_remove_padding": packed}
    made = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=model,
        engine_config=FSDPEngineConfig(**parts),
        optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def other_routes(model, ids: torch.Tensor) -> torch.Tensor:
    """Those next to the model's own, int16[tokens, layers, chosen]; zeros for the last token, and in dense layers."""
    with torch.no_grad():
        logits = dict(zip((0, 2), model(ids[None], output_router_logits=True).router_logits, strict=True))
    chosen = model.config.num_experts_per_tok
    found = torch.zeros(len(ids), model.config.num_hidden_layers, chosen, dtype=torch.int16)
    for layer, of_layer in logits.items():
        found[:-1, layer] = (of_layer.topk(chosen).indices[:-1] + 1) % model.config.num_experts
    return found


def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def batch(samples: list[torch.Tensor], routes: list[torch.Tensor], packed: bool) -> TensorDict:
    """As verl's trainer gives it to the actor."""
    columns = {"input_ids": samples, "position_ids": [torch.arange(len(one)) for one in samples]}
    columns |= {"loss_mask": [torch.ones(len(one)) for one in samples], "routed_experts": routes}
    made = TensorDict({name: jagged(parts) for name, parts in columns.items()}, batch_size=len(samples))
    settings = {"use_remove_padding": packed, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    tensordict_utils.assign_non_tensor(made, temperature=1.0, pad_token_id=0, use_fused_kernels=False, **settings)
    return made


def loss(model_output: dict, data: TensorDict, dp_group) -> tuple[torch.Tensor, dict]:
    """The last token of a sample has no next one."""
    return -sum(one[:-1].sum() for one in model_output["log_probs"].unbind()), {}


def by_transformers(model, samples: list[torch.Tensor], routes: list[torch.Tensor]) -> list[torch.Tensor]:
    """The log probability of each next token, with a gradient."""
    found = []
    for ids, own in zip(samples, routes, strict=True):
        replayed = torch.where(own.flatten(1).any(1)[:, None, None], own, OWN)
        with replayed_routes(model, replayed[None]):
            law = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(law.gather(1, ids[1:, None])[:, 0])
    return found


def gradients(model) -> dict[str, torch.Tensor]:
    whole = ((name.replace("_fsdp_wrapped_module.", ""), one.grad) for name, one in model.named_parameters())
    return {n: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for n, grad in whole if grad is not None}


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def compare(folder: str, strategy: str, packed: bool) -> dict[str, float]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **SDPA)
    samples = [torch.randint(4, model.config.vocab_size, (length,)) for length in LENGTHS]
    routes = [other_routes(model, ids) for ids in samples]
    wanted = by_transformers(model, samples, routes)
    with torch.no_grad():
        plain = by_transformers(model, samples, [torch.zeros_like(one) for one in routes])
    (-sum(one.sum() for one in wanted)).backward()

    actor = engine(folder, strategy, packed)
    given = batch(samples, routes, packed)
    with actor.eval_mode():
        old = [one[:-1] for one in actor.infer_batch(given)["model_output"]["log_probs"].unbind()]
    with actor.train_mode():
        actor.forward_backward_batch(given, loss, forward_only=False)
        found, truth = gradients(actor.module), gradients(model)
    return {
        "log_probs": difference(old, wanted),
        "without": difference(plain, wanted),
        "gradients": difference([found[name] for name in truth], list(truth.values())),
        "greatest": max(one.abs().max().item() for one in truth.values()),
        "hooks": sum(len(one._forward_hooks) for one in actor.module.modules() if "TopKRouter" in type(one).__name__),
    }


if __name__ == "__main__":
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    print(json.dumps(compare(sys.argv[1], sys.argv[2], sys.argv[3] == "packed")))
