"""Replay of routed experts in a trainer's forward pass (R3): its routers choose the experts that the rollout chose.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv 2510.11370): the
rollout's choice, the trainer's own gates, so that gradients reach the router. For models of transformers whose routers
take a softmax over all experts and the greatest of it: Qwen3-MoE, Mixtral, OLMoE and others.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch

from tailrace.deployments.messages.rollout import GroupResult
from tailrace.deployments.results.routed_experts import RoutedExperts

LAYER = re.compile(r"\blayers\.(\d+)\.")
OWN = -1
"""In place of an expert: the trainer's own choice stays."""


PROMPT, ANSWER = "prompt_routes", "completion_routes"
"""Routes among the inputs of a loss, by the names of its other columns."""


def padded_routes(routes: Sequence[RoutedExperts | None], starts: Sequence[int], tokens: int) -> torch.Tensor:
    """Returns the routes of a padded batch: int16[samples, tokens, layers, experts], OWN where a sample has none. One
    or more samples have some. `starts`: place of each sample's first token; `tokens`: those of a padded row.
    """
    shape = next(one.array.shape[1:] for one in routes if one is not None)
    whole = np.full((len(routes), tokens, *shape), OWN, np.int16)
    for row, one, start in zip(whole, routes, starts, strict=True):
        if one is not None:
            row[start : start + len(one)] = one.array
    return torch.from_numpy(whole)


def routes_of(group: GroupResult, inputs: dict) -> dict[str, torch.Tensor]:
    """Returns the columns of a group's routes for the inputs of its loss; none if its engines keep none. `inputs`:
    TRL's, with prompts padded on the left and answers on the right.
    """
    routes = [sample.routed_experts for sample in group.samples]
    if all(one is None for one in routes):
        return {}
    prompt, answer = inputs["prompt_ids"], inputs["completion_ids"]
    starts = [prompt.shape[1] - len(group.prompt_token_ids)] * len(routes)
    whole = padded_routes(routes, starts, prompt.shape[1] + answer.shape[1]).to(prompt.device)
    return {PROMPT: whole[:, : prompt.shape[1]], ANSWER: whole[:, prompt.shape[1] :]}


def replayed_inputs(model: torch.nn.Module, inputs: dict) -> AbstractContextManager[None]:
    """Takes the columns of routes out of a pass's inputs. Returns what replays them, see `replayed_routes`."""
    if PROMPT not in inputs:
        return nullcontext()
    return replayed_routes(model, torch.cat([inputs.pop(PROMPT), inputs.pop(ANSWER)], 1))


@contextmanager
def replayed_routes(model: torch.nn.Module, routes: torch.Tensor) -> Iterator[None]:
    """Has the model's routers choose these experts, see `padded_routes`, in each forward pass of this batch.

    Raises ValueError, one line, if the model has no routers, or, in the pass, if they are of another kind.
    """
    routers = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("TopKRouter")}
    if not routers:
        raise ValueError(f"{type(model).__name__} has no routers of experts; replay nothing for it")
    hooks = []
    try:
        for name, router in routers.items():
            of_layer = routes[:, :, int(LAYER.search(name)[1])].flatten(0, 1)
            hooks.append(router.register_forward_hook(partial(_replayed, routes=of_layer)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replayed(router: torch.nn.Module, _given: tuple, output: tuple, routes: torch.Tensor) -> tuple:
    """Returns a router's output with other experts. `output`: logits [n, all experts], scores and experts [n, chosen].
    `routes`: int16[n, chosen].
    """
    logits, scores, chosen = output
    shares = logits.float().softmax(-1)
    own, is_normal = shares.gather(1, chosen), bool((scores.sum(-1) - 1).abs().max() < 0.01)
    if not torch.allclose(_normal(own, is_normal), scores.float(), atol=0.01):
        raise ValueError(f"{type(router).__name__}: its scores are no softmax over its experts; replay is not for it")
    routes = routes.to(chosen.device, chosen.dtype)
    routes = torch.where(routes == OWN, chosen, routes)
    return logits, _normal(shares.gather(1, routes), is_normal).to(scores.dtype), routes


def _normal(shares: torch.Tensor, is_normal: bool) -> torch.Tensor:
    return shares / shares.sum(-1, keepdim=True) if is_normal else shares
