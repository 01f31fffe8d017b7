"""What the control plane carries: the cost of each call, decision, key and message that docs/measurements/scale.md
reckons with.

Parts are measured one after another, each with nothing else running; processor time beside wall time, since on shared
cores only the former repeats. Invariant: nothing here is a model. Called by `tailrace bench control`.
"""

import pickle
import time
from collections.abc import Callable

from benchmarks.control_plane import control_line, control_pool, control_ray, control_socket, scheduler
from benchmarks.control_plane.rpc_latency import IN_FLIGHT
from tailrace.app.errors import Failed
from tailrace.deployments.messages.rollout import SampleResult
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import SampleEnd

REPLICAS = 512
"""For 16,384 samples, and as many for each at other numbers."""

RESULTS, RESULT_TOKENS = 20, 8_192


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
    """Microseconds to check a finished sample's result and to pack it, for each of its tokens; and its bytes."""
    tokens, logprobs = tuple(range(RESULT_TOKENS)), tuple(-1.0 / (1 + n) for n in range(RESULT_TOKENS))
    began_s = time.process_time()
    for _ in range(RESULTS):
        result = SampleResult(
            sample_index=0, token_ids=tokens, text="word" * RESULT_TOKENS, logprobs=logprobs, raw_logprobs=logprobs,
            finish_reason=SampleEnd.STOP,
        )  # fmt: skip
        packed = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    took_s = time.process_time() - began_s
    return {"us": round(1e6 * took_s / RESULTS / RESULT_TOKENS, 3), "bytes": round(len(packed) / RESULT_TOKENS, 1)}
