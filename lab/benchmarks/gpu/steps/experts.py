"""Tests a mixture of experts: equal tokens in each way to compute them, new weights, and what the engine then holds."""

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
    """Destroys vLLM's process groups of earlier steps. The steps of a dry run share a process, and the groups of a
    dense model include none for experts. vLLM is not imported here, since an engine's settings must be set before the
    import.
    """
    groups = sys.modules.get("vllm.distributed.parallel_state")
    if groups is not None and groups.model_parallel_is_initialized():
        groups.destroy_model_parallel()
