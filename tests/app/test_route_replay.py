"""Replay of routed experts in routers of torch alone."""

import numpy as np
import pytest
import torch

from tailrace.app.trl import unused_routes
from tailrace.app.trl.route_replay import padded_routes, replayed_routes
from tailrace.deployments.results.routed_experts import RoutedExperts

EXPERTS = 4


class OnlyTopKRouter(torch.nn.Module):
    """Chooses the greatest of its inputs, [tokens, EXPERTS]."""

    def forward(self, logits):
        scores, chosen = logits.softmax(-1).topk(1)
        return logits, scores / scores.sum(-1, keepdim=True), chosen


class OnlyRouters(torch.nn.Module):
    """`calls`: layers whose router is called. Returns what each has chosen."""

    def __init__(self, calls: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"gate": OnlyTopKRouter()}) for _ in range(2))
        self.calls = calls

    def forward(self, logits):
        return [layer["gate"](logits)[2][:, 0].tolist() for layer in self.layers[: self.calls]]


ROUTES = padded_routes([RoutedExperts(np.array([[[3], [2]]], np.uint8)), None], [1, 0], 3)
"""Of two rows of three tokens: those of the first row's second token, expert 3 in the first layer and 2 in the next."""

LOGITS = torch.tensor([[0.0, 9.0, 0.0, 0.0]] * 6)


def test_routers_choose_what_is_replayed_and_else_for_themselves():
    model = OnlyRouters(2)
    with replayed_routes(model, ROUTES):
        assert model(LOGITS) == [[1, 3, 1, 1, 1, 1], [1, 2, 1, 1, 1, 1]]
    assert model(LOGITS) == [[1] * 6] * 2


def test_a_model_that_calls_no_router_is_no_silent_replay():
    model = OnlyRouters(0)
    with pytest.raises(ValueError, match="OnlyRouters has called none of its routers"), replayed_routes(model, ROUTES):
        model(LOGITS)
    with (
        pytest.raises(ValueError, match="Linear has no routers of experts"),
        replayed_routes(torch.nn.Linear(1, 1), ROUTES),
    ):
        pass


def test_routes_that_are_not_replayed_are_told_once(caplog):
    unused_routes._warn.cache_clear()
    unused_routes.warn_of_routes([None, None])
    assert caplog.messages == []
    for _ in range(2):
        unused_routes.warn_of_routes([None, RoutedExperts(np.zeros((1, 1, 1), np.uint8))])
    assert caplog.messages == [
        "AsyncGRPOTrainer does not replay the engines' routed experts: its routers choose for themselves"
    ]
