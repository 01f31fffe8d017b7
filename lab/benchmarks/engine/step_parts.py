"""Processor time of an engine's steps by part: timers around the parts of one engine, without a profiler.

Invariant: a part has only its own time. If it calls another part, the time inside counts for the other part. Called by
overhead_engines.py, in an engine's process.
"""

from collections import Counter
from collections.abc import Callable
from time import thread_time

OUTSIDE = "engine"
"""Name of the part for all time outside the timers."""

MODEL, SAMPLER = "model", "sampler"
"""Names of two parts: the forward pass with the products with the vocabulary, and the drawing of tokens."""

KERNELS = "kernels"
"""Name of the part for Triton kernels, vLLM's and ours, with vLLM's second runner. A GPU runs them while the host
continues.
"""

DRAFTING = PROPOSALS, FEED = "proposals", "feed"
"""Names of the parts for drafts from the index, on the step's thread."""


class StepParts:
    """Processor seconds of one thread by part. A timed call costs a microsecond. `clock`: returns seconds."""

    def __init__(self, clock: Callable[[], float] = thread_time):
        self.spent_s: Counter[str] = Counter()
        self._clock, self._open, self._since_s = clock, [OUTSIDE], clock()

    def wrap(self, owner: object, part: str, *names: str) -> None:
        """Puts timers around these methods of an object."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def take(self) -> dict[str, float]:
        """Returns the seconds by part since the last call of `take`."""
        self._turn()
        spent_s, self.spent_s = self.spent_s, Counter()
        return dict(spent_s)

    def _turn(self) -> None:
        now_s = self._clock()
        self.spent_s[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    def _timed(self, inner: Callable, part: str) -> Callable:
        def timed(*args, **kwargs):
            self._turn()
            self._open.append(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        return timed


def around_vllm(parts: StepParts, engine) -> None:
    """Puts timers around vLLM's own parts. `engine`: an LLMEngine that steps in this process."""
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    parts.wrap(runner.model, MODEL, "compute_logits")
    if hasattr(runner, "_model_forward"):
        parts.wrap(runner, MODEL, "_model_forward")
        parts.wrap(runner, SAMPLER, "_sample")
    else:
        from triton.runtime.interpreter import GridExecutor

        parts.wrap(runner.model, MODEL, "forward")
        parts.wrap(runner, SAMPLER, "sample")
        parts.wrap(GridExecutor, KERNELS, "__call__")
    parts.wrap(runner, "runner", "execute_model", "sample_tokens")
    parts.wrap(core.scheduler, "scheduler", "schedule", "update_from_output", "update_draft_token_ids")
    parts.wrap(engine.output_processor, "outputs", "process_outputs")


def around_ours(parts: StepParts, stepper) -> None:
    """Puts timers around vLLM's parts and those that Tailrace adds. `stepper`: a Stepper."""
    around_vllm(parts, stepper._engine)
    runner = stepper._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    parts.wrap(runner.sampler.records, "records", "slots", "write", "write_more")
    parts.wrap(stepper, "stepper", "step")
    parts.wrap(stepper, "stats", "stats")
    if stepper._pool is not None:
        _around_pool(parts, stepper)
    drafts = stepper._drafts
    if drafts is not None:
        parts.wrap(drafts, PROPOSALS, "propose", "made_by")
        parts.wrap(drafts._feed, FEED, "take", "append")


def _around_pool(parts: StepParts, stepper) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    parts.wrap(stepper._pool, "pool", "after_step", "saved", "fields", "counts")
    parts.wrap(stepper._scheduler.connector, "pool", "build_connector_meta", "update_connector_output")
    for_step = "bind_connector_metadata", "start_load_kv", "wait_for_save", "get_transfer_results"
    after_step = "get_block_ids_with_load_errors", "get_kv_connector_stats", "build_connector_worker_meta"
    parts.wrap(get_kv_transfer_group(), "pool", *for_step, *after_step, "clear_connector_metadata")
