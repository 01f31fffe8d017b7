"""The outputs of vLLM's steps. Tokens of requests that continue are passed on without an object for each request.

Symptom (vLLM 0.32): for 256 requests its output processor makes 256 objects of 20 fields a step, 1.3 ms on a CPU core.
Invariant: a request's first and last outputs pass through vLLM's processor, which needs them for its state; so do all
outputs where vLLM keeps statistics. Requests are those of `Requests.add`: new tokens only, no text, no logprobs of
vLLM's. Remove when the engine's step can return the core's outputs. Owned by the stepper, on the engine's thread.
"""

import time
from typing import NamedTuple

from tailrace.deployments.vllm_exact.async_scheduling import AsyncScheduling


class StepOutput(NamedTuple):
    """New tokens of the request with this name, and the reason of its end, or None while it continues.

    `whole`: vLLM's RequestOutput, or None between a request's first output and its last.
    """

    name: str
    token_ids: list[int]
    reason: str | None
    whole: object | None


class StepOutputs:
    """`engine`: vLLM's LLMEngine in this process. `scheduling`: None for an engine whose steps always wait."""

    def __init__(self, engine):
        self.engine, processor = engine, engine.output_processor
        self._core = core = engine.engine_core.engine_core
        self.scheduling = AsyncScheduling(core) if core.async_scheduling else None
        self._states, self._process_all = processor.request_states, processor.process_outputs
        self._continued: list[StepOutput] = []
        processor.process_outputs = self._process

    def step(self, ahead: bool = False) -> list[StepOutput]:
        """Runs one step of the engine. Returns an output for each request that has made tokens or ended. `ahead`: see
        `AsyncScheduling.set`.
        """
        if self.scheduling is not None:
            self.scheduling.set(ahead)
        whole = self.engine.step()
        found, self._continued = self._continued, []
        for output in whole:
            made = output.outputs[0]
            reason = made.finish_reason if output.finished else None
            found.append(StepOutput(output.request_id, made.token_ids, reason, output))
        return found

    def drop_answers(self) -> None:
        """Drops what the ranks have answered to steps, after one that raised.

        With a pool every rank answers a step. vLLM's executor (0.32) stops at the first error, and its next call would
        read the other ranks' answers to this step. Without other ranks there are no queues.
        """
        executor, mark = self._core.model_executor, f"up to {time.monotonic_ns()}"
        if queues := getattr(executor, "response_mqs", ()):
            executor.rpc_broadcast_mq.enqueue(("echo", (mark,), {}, None))
        for queue in queues:
            while queue.dequeue()[1] != mark:
                pass

    def _process(self, outputs: list, engine_core_timestamp=None, iteration_stats=None, weight_version=None):
        """Replaces `OutputProcessor.process_outputs`, which gets only the outputs that are not handled here."""
        rest = outputs
        if iteration_stats is None:
            states, continued, rest = self._states, self._continued, []
            for output in outputs:
                state = states.get(output.request_id)
                if state is None or state.is_prefilling or output.finish_reason is not None:
                    rest.append(output)
                else:
                    continued.append(StepOutput(state.external_req_id, output.new_token_ids, None, None))
        return self._process_all(rest, engine_core_timestamp, iteration_stats, weight_version)
