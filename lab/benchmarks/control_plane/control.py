"""Benchmark of the control plane: cost of each call, decision, key and message.

docs/measurements/scale.md calculates with these costs. Parts are measured one after another, each with nothing else
running. Processor time is given beside wall time: on shared cores only processor time repeats. Invariant: nothing here
is a model. Called by `tailrace bench control`.
"""

import pickle
import time
from collections.abc import Callable

import numpy as np

from tailrace.app.errors import Failed
from tailrace.deployments.messages.rollout import SampleResult
from tailrace.deployments.results.columns import Column
from tailrace.deployments.results.later_text import TextRule
from tailrace.lab.benchmarks.control_plane import control_line, control_pool, control_ray, control_socket, scheduler
from tailrace.lab.benchmarks.control_plane.rpc_latency import IN_FLIGHT
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import SampleEnd

REPLICAS = 512
"""Number of replicas for 16,384 samples. Other numbers of samples have as many samples per replica."""

RESULTS, RESULT_TOKENS = 1_000, 8_192


def measure(calls: int, keys: int, samples: int, say: Callable[[str], None]) -> dict:
    """Returns the costs from `calls` calls of each kind, `keys` keys of the pool, and decisions over `samples` samples.
    Raises Failed, in one line.
    """
    found = {"in_flight": IN_FLIGHT, **control_ray.measure(calls, say), "pool_key": control_pool.measure(keys, say)}
    try:
        found["zeromq"] = control_socket.measure(calls)
        found["line_chunk"] = control_line.measure(calls)
    except TimeoutError as error:
        raise Failed(str(error) or "the engine's end of a line has not come up") from error
    say(f"zeromq: {found['zeromq']}")
    say(f"line_chunk: {found['line_chunk']}")
    found["result_token"] = result_token()
    say(f"core: decisions over {samples} samples")
    return found | {"core": core(samples)}


def core(samples: int) -> dict:
    """Returns the microseconds of a decision of the rollout core, as `bench scheduler` counts them: its fastest run."""
    policies = Policies(chunking={"type": "fixed", "chunk_tokens": scheduler.CHUNK_TOKENS})
    run = scheduler.best(samples, max(1, REPLICAS * samples // 16_384), policies)
    return {"samples": samples, "decisions": run["decisions"], "decision_us": round(1e6 / run["decisions_per_s"], 1)}


def result_token() -> dict:
    """Returns, per token, the microseconds to make a finished sample's result and to pack it as for Ray's object store,
    and the bytes of the result. The result has no text, since drivers decode it.
    """
    tokens = Column(np.arange(RESULT_TOKENS, dtype=np.int32))
    logprobs, raw_logprobs = (Column(np.zeros(RESULT_TOKENS, np.float32)) for _ in range(2))
    began_s = time.process_time()
    for _ in range(RESULTS):
        result = SampleResult.later(
            TextRule("tokenizer", stopped=True), sample_index=0, token_ids=tokens, logprobs=logprobs,
            raw_logprobs=raw_logprobs, finish_reason=SampleEnd.STOP,
        )  # fmt: skip
        buffers: list[pickle.PickleBuffer] = []
        packed = b"".join([pickle.dumps(result, 5, buffer_callback=buffers.append), *(one.raw() for one in buffers)])
    took_s = time.process_time() - began_s
    return {"us": round(1e6 * took_s / RESULTS / RESULT_TOKENS, 4), "bytes": round(len(packed) / RESULT_TOKENS, 1)}
