"""What the control plane carries: the cost of each call, decision, key and message that docs/measurements/scale.md
reckons with.

Parts are measured one after another, each with nothing else running; processor time beside wall time, since on shared
cores only the former repeats. Invariant: nothing here is a model. Called by `tailrace bench control`.
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
"""For 16,384 samples, and as many for each at other numbers."""

RESULTS, RESULT_TOKENS = 1_000, 8_192


def measure(calls: int, keys: int, samples: int, say: Callable[[str], None]) -> dict:
    """`calls` of each kind, `keys` of the pool, decisions over `samples`. Raises Failed, in one line."""
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
    """Microseconds of a decision of the rollout core, as `bench scheduler` counts them; the best of a few runs."""
    policies = Policies(chunking={"type": "fixed", "chunk_tokens": scheduler.CHUNK_TOKENS})
    run = scheduler.best(samples, max(1, REPLICAS * samples // 16_384), policies)
    return {"samples": samples, "decisions": run["decisions"], "decision_us": round(1e6 / run["decisions_per_s"], 1)}


def result_token() -> dict:
    """Microseconds to make a finished sample's result and to pack it as for Ray's object store, for each of its tokens;
    and its bytes. Its text is not there: drivers decode it."""
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
