"""Replay of routed experts in a trainer's forward pass (R3): its routers choose the experts that the rollout chose.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv 2510.11370): the
rollout's choice, the trainer's own gates, so that gradients reach the router. For models of transformers whose routers
take a softmax over all experts and the greatest of it: Qwen3-MoE, Mixtral, OLMoE and others.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from tailrace.deployments.results.routed_experts import RoutedExperts

LAYER = re.compile(r"\blayers\.(\d+)\.")
OWN = -1
"""In place of an expert: the trainer's own choice stays."""


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


@contextmanager
def replayed_routes(model: torch.nn.Module, routes: torch.Tensor) -> Iterator[None]:
    """Has the model's routers choose these experts, see `padded_routes`, in each forward pass of this batch.

    Raises ValueError, one line, if the model has no routers or has called none of them, or, in the pass, if they are of
    another kind.
    """
    routers = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("TopKRouter")}
    if not routers:
        raise ValueError(f"{type(model).__name__} has no routers of experts; replay nothing for it")
    called: set[torch.nn.Module] = set()
    hooks = []
    try:
        for name, router in routers.items():
            of_layer = routes[:, :, int(LAYER.search(name)[1])].flatten(0, 1)
            hooks.append(router.register_forward_hook(partial(_replayed, routes=of_layer, called=called)))
        yield
        if not called:
            raise ValueError(
                f"{type(model).__name__} has called none of its routers: kernels replace them; replay nothing"
            )
    finally:
        for hook in hooks:
            hook.remove()


def _replayed(router: torch.nn.Module, _given: tuple, output: tuple, *, routes: torch.Tensor, called: set) -> tuple:
    """Returns a router's output with other experts. `output`: logits [n, all experts], scores and experts [n, chosen].
    `routes`: int16[n, chosen]. `called`: the router is added.
    """
    called.add(router)
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
