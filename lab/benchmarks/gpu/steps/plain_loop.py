"""Times vLLM as it ships: its engine in a process of its own, its sampler, with or without asynchronous scheduling."""

import time

import numpy as np

from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.lab.benchmarks.gpu.steps.decoding import PROMPT_TOKENS, SAMPLES
from tailrace.lab.benchmarks.gpu.steps.engine import CLOCK, EAGER, made, vocabulary_of

TOKENS = 256
ROUNDS = (None, None, 0)
"""vLLM's parameter `logprobs` in the rounds of each size. The first one may still compile; the last one returns the
logprobs of the tokens, as our engine always does.
"""


def inputs(place: Place, waits: bool) -> dict:
    """Returns the arguments of vLLM's `LLM`, without the model."""
    sizes = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 8 << 30,
    }
    if place.small:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 25}
    found = sizes | {"dtype": place.dtype, "disable_log_stats": True, "worker_extension_cls": CLOCK}
    if waits:
        found["async_scheduling"] = False
    if EAGER or place.small:
        found["enforce_eager"] = True
    return found


def loop(step: Measurements, waits: bool) -> None:
    """Measures tokens per second with 8, 64 and 256 samples. `waits`: whether asynchronous scheduling is off."""
    found = []

    def start() -> dict:
        from vllm import LLM

        began_s = time.perf_counter()
        model, arguments = made(step.place, "135M")
        found.append(LLM(model=model, **arguments, **inputs(step.place, waits)))
        config = found[0].llm_engine.vllm_config.scheduler_config
        return {"start_s": time.perf_counter() - began_s, "async_scheduling": config.async_scheduling}

    step.must("start of 135M", start)
    vocabulary = vocabulary_of(step.place, "135M")
    for samples in step.place.of(SAMPLES, (2,)):
        for turn, logprobs in enumerate(ROUNDS):
            given = {"samples": samples, "turn": turn, "logprobs": logprobs, "vocabulary": vocabulary}
            what = f"{samples} samples, round {turn + 1}" + (", logprobs" if logprobs is not None else "")
            step.tried(what, lambda given=given: _generate(step, found[0], **given))


def _generate(step: Measurements, llm, samples: int, turn: int, logprobs: int | None, vocabulary: int) -> dict:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    rng, tokens = np.random.default_rng((samples, turn)), step.place.of(TOKENS, 8)
    settings = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, "logprobs": logprobs}
    params = SamplingParams(temperature=1.0, **settings)
    size = step.place.of(PROMPT_TOKENS, 8)
    prompts = [TokensPrompt(prompt_token_ids=rng.integers(3, vocabulary, size).tolist()) for _ in range(samples)]
    llm.collective_rpc("watch_passes")
    began_s = time.perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began_s
    made_tokens = sum(len(each.outputs[0].token_ids) for each in found)
    return {
        "tokens_a_second": round(made_tokens / seconds),
        "ms_a_step": round(1e3 * seconds / tokens, 3),
    } | llm.collective_rpc("pass_times")[0]
