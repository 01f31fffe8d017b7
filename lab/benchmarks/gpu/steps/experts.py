"""A mixture of experts: equal tokens however they are computed, new weights, and what the engine then holds."""

import sys

from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.engine import vocabulary_of
from tailrace.lab.benchmarks.gpu.steps.exactness import SameSamples
from tailrace.lab.benchmarks.gpu.steps.ours import started
from tailrace.lab.benchmarks.gpu.steps.weights import NewWeights

SHAPE = "experts"


def experts(step: Measurements) -> None:
    leave_dense_groups()
    engine = started(step, SHAPE, eager=True, enable_return_routed_experts=True)
    SameSamples(step, engine, vocabulary_of(step.place, SHAPE)).compare()
    step.tried("new weights", NewWeights(step, SHAPE, engine).from_a_folder)


def leave_dense_groups() -> None:
    """Ends vLLM's groups of the steps before: a dry run's steps share a process, and a dense model has no group of
    experts. vLLM is not loaded here, since an engine's settings come before it.
    """
    groups = sys.modules.get("vllm.distributed.parallel_state")
    if groups is not None and groups.model_parallel_is_initialized():
        groups.destroy_model_parallel()
