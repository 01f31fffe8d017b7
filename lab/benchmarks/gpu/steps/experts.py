"""A mixture of experts: equal tokens however they are computed, new weights, and what the engine then holds."""

from vllm.distributed.parallel_state import destroy_model_parallel, model_parallel_is_initialized

from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.engine import vocabulary_of
from tailrace.lab.benchmarks.gpu.steps.exactness import SameSamples
from tailrace.lab.benchmarks.gpu.steps.ours import started
from tailrace.lab.benchmarks.gpu.steps.weights import NewWeights

SHAPE = "experts"


def experts(step: Measurements) -> None:
    if model_parallel_is_initialized():  # a dry run's steps share a process, whose groups are those of a dense model
        destroy_model_parallel()
    engine = started(step, SHAPE, eager=True, enable_return_routed_experts=True)
    SameSamples(step, engine, vocabulary_of(step.place, SHAPE)).compare()
    step.tried("new weights", NewWeights(step, SHAPE, engine).from_a_folder)
