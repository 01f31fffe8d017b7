"""Tests weights and KV in FP8: equal tokens in each way to compute them, and new weights, which the engine quantizes.

On a CPU vLLM has FP8 weights only with bfloat16, and a dry run uses float32. So only the KV is in FP8 there.
"""

from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.engine import vocabulary_of
from tailrace.lab.benchmarks.gpu.steps.exactness import SameSamples
from tailrace.lab.benchmarks.gpu.steps.ours import started
from tailrace.lab.benchmarks.gpu.steps.weights import NewWeights

SHAPE = "1.7B"


def fp8(step: Measurements) -> None:
    weights = {"quantization": "fp8"} if step.place.card else {}
    engine = started(step, SHAPE, eager=True, kv_cache_dtype="fp8", **weights)
    SameSamples(step, engine, vocabulary_of(step.place, SHAPE)).compare()
    step.tried("new weights", NewWeights(step, SHAPE, engine).from_a_folder)
