"""Tests vLLM's own drafter on its second model runner. The drafter draws with the samples' noise, inside of CUDA
graphs.

The model is its own draft model, so nearly all drafts are right if positions and keys are those of the samples.
"""

from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.engine import DRAFT_TOKENS, made, vocabulary_of
from tailrace.lab.benchmarks.gpu.steps.exactness import SameSamples
from tailrace.lab.benchmarks.gpu.steps.ours import started

SHAPE = "135M"


def drafter(step: Measurements) -> None:
    model, _ = made(step.place, SHAPE)
    own = {"method": "draft_model", "model": model, "num_speculative_tokens": DRAFT_TOKENS}
    engine = started(step, SHAPE, runner="v2", draft="vllm", speculative_config=own)
    SameSamples(step, engine, vocabulary_of(step.place, SHAPE)).compare()
    work = engine.stepper.stats().work
    names = "steps", "steps_ahead", "drafted.vllm", "accepted.vllm"
    step.say("steps and drafts", **{name.replace(".", "_"): work.get(name, 0) for name in names})
