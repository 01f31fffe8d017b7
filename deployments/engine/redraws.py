"""Draws close calls again from a canonical computation: the whole context in one request, alone in its steps.

Invariant: as long as noise stays below the tolerance, no token depends on its batch, chunk or drafts.
A draw with a wider margin equals that of the canonical computation; a closer one is replaced by it.
The canonical request reads no KV, and no other request reads its KV. Its steps depend on the context's length alone.
A token that changes ends its request in vLLM; another one continues the chunk. Owned by the stepper.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np

from tailrace.deployments.engine.engine_chunk import EngineChunk
from tailrace.deployments.engine.step_outputs import StepOutput, StepOutputs
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.vllm_exact.engine_config import ROUTED_EXPERTS
from tailrace.deployments.vllm_exact.logprob_store import DrawRecord
from tailrace.deployments.vllm_exact.pause import alone
from tailrace.deployments.vllm_exact.requests import Requests

NO_POOL = {"version": 0, "min_pull_tokens": None, "save": False, "save_prompt": False}

IDLE_STEPS = 8
"""Maximum number of steps that a redraw may take beyond those of its tokens; it needs none."""


class Redraws:
    """The redraws of one engine. `drop`: drops the records of a vLLM request, by vLLM's id.

    `replace`: takes a chunk's id and the request that continues it.
    """

    def __init__(
        self,
        outputs: StepOutputs,
        requests: Requests,
        has_pool: bool,
        drop: Callable[[str], None],
        replace: Callable[[str, object], None],
    ):
        self._engine, self._outputs, self._requests = outputs.engine, outputs, requests
        self._drop, self._replace = drop, replace
        engine = outputs.engine
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._step_tokens = engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._max_model_len = engine.vllm_config.model_config.max_model_len
        self._has_routes = ROUTED_EXPERTS in engine.vllm_config.additional_config
        self._kv = NO_POOL if has_pool else None
        self._closed: dict[str, int] = {}
        self.counts = {"redraws": 0, "redraws_changed": 0, "redraw_us": 0}

    def after_step(self, outputs: list[StepOutput], running: Mapping[str, EngineChunk]) -> None:
        """Fetches the close calls of the step that has just ended, if they are drawn again; and the routed experts of
        chunks whose requests it has ended, which vLLM forgets in the next step, so in a redraw's.
        """
        if self._requests.redraws:
            self._closed = self._engine.collective_rpc("take_closed")[0]
        for output in outputs if self._has_routes else ():
            if output.reason is not None:
                self.read_routes(running[output.name])

    def read_routes(self, running: EngineChunk) -> None:
        """Reads the routed experts of a chunk's request that ends, if its engine keeps them and vLLM still has it."""
        if self._has_routes:
            end = min(running.request.num_computed_tokens, running.request.num_tokens - 1)
            found = self._engine.collective_rpc(
                "routed_experts", args=(running.request_id, running.chunk.routes_from, end)
            )
            running.routes = running.routes if found[0] is None else found[0]

    def settle(self, running: EngineChunk, token_ids: list[int], reason: str | None, outputs: list):
        """Returns (token ids, reason of the end or None, whether a stop text ends them) of a chunk's step, up to a stop
        text, with its last token drawn again if it was close.

        `reason`: vLLM's reason of this step. Outputs of other requests, if any, are appended to `outputs`.
        """
        token_ids, stopped = running.until_stop(token_ids, self._requests.decode)
        start = len(running.chunk.token_ids) + len(running.token_ids)
        if not token_ids or self._closed.get(running.request_id) != start + len(token_ids) - 1:
            return token_ids, reason, stopped  # the close call may be a token after the stop text
        began_s = time.perf_counter()
        context = np.concatenate([running.context(), np.array(token_ids[:-1], np.int32)])
        token, stops, record = self.draw(running.chunk, context, outputs)
        running.redrawn[len(running.token_ids) + len(token_ids) - 1] = record
        self.counts["redraws"] += 1
        if token != token_ids[-1]:
            self.counts["redraws_changed"] += 1
            token_ids, stopped = running.until_stop([*token_ids[:-1], token], self._requests.decode)
            left = running.chunk.max_tokens - len(running.token_ids) - len(token_ids)
            left = min(left, self._max_model_len - len(context) - 1)
            ended, reason = reason is not None, "stop" if stops else None if left else "length"
            self._change(running, np.append(context, np.int32(token)), ended, left if reason is None else 0)
        self.counts["redraw_us"] += int((time.perf_counter() - began_s) * 1e6)
        return token_ids, reason, stopped

    def draw(self, chunk: ChunkRequest, context: np.ndarray, outputs: list) -> tuple[int, bool, DrawRecord]:
        """Returns the canonical token after `context`, whether it is a stop token, and its record.

        Outputs of other requests, if any, are appended to `outputs`.
        """
        name = f"redraw {self.counts['redraws']} of {chunk.chunk_id}"
        drawn = None
        with alone(self._scheduler):
            request = self._requests.add(name, chunk, context, 1, self._kv, private=True)
            for _ in range(len(context) // self._step_tokens + IDLE_STEPS):
                for output in self._outputs.step():
                    if output.name == name:
                        drawn = output
                    else:
                        outputs.append(output)
                if drawn is not None:
                    break
            else:
                raise RuntimeError(f"{name}: no room for {len(context)} tokens, although it was reserved")
        record = self._engine.collective_rpc("take_record", args=(request.request_id, len(context), 1))[0]
        self._drop(request.request_id)
        return drawn.token_ids[0], drawn.reason == "stop", record

    def _change(self, running: EngineChunk, context: np.ndarray, ended: bool, left: int) -> None:
        """Ends the chunk's request, whose last token differs. `left`: number of tokens that a new request may make."""
        made = len(context) - len(running.chunk.token_ids)
        if not ended:
            self._requests.abort(running.request_id)
        if left:
            self.keep(running, made)
            self._drop(running.request_id)
            request = self.continuing(running, context, left)
            self._replace(running.chunk.chunk_id, request)
            running.request, running.request_id = request, request.request_id

    def continuing(self, running: EngineChunk, context: np.ndarray, left: int | None = None):
        """Returns the request that continues a chunk. `left`: number of tokens that it may make, or None for all."""
        left = running.chunk.max_tokens - len(running.token_ids) if left is None else left
        return self._requests.add(running.chunk.chunk_id, running.chunk, context, left, self._continued(running))

    def _continued(self, running: EngineChunk) -> dict | None:
        """Returns the `kv_transfer_params` of the continuing request: it saves its KV as the first one would have."""
        plan = running.chunk.kv
        if self._kv is None or plan is None:
            return self._kv
        return self._kv | {"version": plan.version, "save": plan.save, "save_stopped": plan.save_stopped}

    def keep(self, running: EngineChunk, made: int) -> DrawRecord:
        """Adds the record of the chunk's request. Returns the record of all `made` tokens of the chunk, redraws
        included.
        """
        self.read_routes(running)
        before = len(running.record.logprobs)
        wanted = (running.request_id, len(running.chunk.token_ids) + before, made - before)
        # Every tensor-parallel rank keeps the same records; those of the first are used.
        running.record = running.record.then(self._engine.collective_rpc("take_record", args=wanted)[0])
        for place, record in running.redrawn.items():
            running.record = running.record.redrawn(place, record)
        return running.record
