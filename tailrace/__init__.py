"""Tailrace: exact, elastic rollouts for LLM reinforcement learning, on Ray Serve and vLLM.

The names below load when they are used, so `import tailrace` costs nothing and needs neither Ray nor vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.app.calls.client import RolloutClient
    from tailrace.app.calls.length_order import LengthOrder
    from tailrace.app.calls.refused import AdapterRejected, RolloutRejected, UnknownAdapter, WeightsRejected
    from tailrace.app.cluster import connect
    from tailrace.app.trl.async_rollouts import AsyncRollouts
    from tailrace.app.trl.async_trajectories import AsyncTrajectories
    from tailrace.app.trl.async_weights import AsyncWeights
    from tailrace.app.trl.generation import attach
    from tailrace.app.weights.saved import saved_weights
    from tailrace.app.weights.score import weights_score
    from tailrace.deployments.messages.rollout import (
        ChatMessage,
        GroupResult,
        PromptGroup,
        RolloutBatch,
        SampleResult,
        SamplingParams,
    )

_HOMES = {
    "AsyncRollouts": "tailrace.app.trl.async_rollouts",
    "AsyncTrajectories": "tailrace.app.trl.async_trajectories",
    "AsyncWeights": "tailrace.app.trl.async_weights",
    "attach": "tailrace.app.trl.generation",
    "connect": "tailrace.app.cluster",
    "saved_weights": "tailrace.app.weights.saved",
    "weights_score": "tailrace.app.weights.score",
    "AdapterRejected": "tailrace.app.calls.refused",
    "UnknownAdapter": "tailrace.app.calls.refused",
    "LengthOrder": "tailrace.app.calls.length_order",
    "RolloutClient": "tailrace.app.calls.client",
    "RolloutRejected": "tailrace.app.calls.refused",
    "WeightsRejected": "tailrace.app.calls.refused",
    "ChatMessage": "tailrace.deployments.messages.rollout",
    "GroupResult": "tailrace.deployments.messages.rollout",
    "PromptGroup": "tailrace.deployments.messages.rollout",
    "RolloutBatch": "tailrace.deployments.messages.rollout",
    "SampleResult": "tailrace.deployments.messages.rollout",
    "SamplingParams": "tailrace.deployments.messages.rollout",
}

__all__ = [
    "AdapterRejected",
    "AsyncRollouts",
    "AsyncTrajectories",
    "AsyncWeights",
    "ChatMessage",
    "GroupResult",
    "LengthOrder",
    "PromptGroup",
    "RolloutBatch",
    "RolloutClient",
    "RolloutRejected",
    "SampleResult",
    "SamplingParams",
    "UnknownAdapter",
    "WeightsRejected",
    "attach",
    "connect",
    "saved_weights",
    "weights_score",
]


def __getattr__(name: str):
    if name == "rollout_function":
        raise AttributeError("tailrace.rollout_function is gone: write tailrace.attach(trainer, client) instead")
    if name not in _HOMES:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
