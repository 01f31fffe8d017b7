"""Copies of a chunk that verify other branches of its draft in the same step (multi-path drafts, Seer 4.4).

vLLM verifies one path for each request. A fork is one more request with the sample's own noise.
It shares the KV of the full blocks before it. The sample will generate each token that the fork accepts.
The fork's tokens therefore go into the group's index and become the chunk's next draft.
Invariant: forks never add to a result, and never hold KV that a chunk has reserved.
Off unless `draft.paths` is above 1; owned by the stepper, on the engine's thread.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.deployments.vllm_exact.requests import Requests

NO_POOL = {"version": 0, "min_pull_tokens": None, "save": False, "save_prompt": False}


@dataclass(slots=True)
class Fork:
    """A copy of `chunk` on branch `path`; it has made `generated` tokens of the answer."""

    chunk: ChunkRequest
    path: int
    request: object  # vLLM's scheduler-side Request
    generated: int
    fresh: bool = False  # whether it made tokens in the last step, and so takes a draft for the next one


class Forks:
    """The forks of one engine. `limits`: as in EngineStats. `forget`: called with vLLM's id of each ended fork."""

    def __init__(
        self,
        requests: Requests,
        draft: DraftConfig,
        limits: dict,
        has_pool: bool,
        forget: Callable[[str], None],
    ):
        self._requests, self._forget = requests, forget
        self._paths, self._most_running = draft.paths, draft.fork_running
        self._block_tokens, self._capacity_blocks = limits["block_tokens"], limits["kv_capacity_blocks"]
        self._max_running, self._draft_tokens = limits["max_running"], limits["draft_tokens"]
        self._kv = NO_POOL if has_pool else None
        self._forks: dict[str, Fork] = {}  # by the name of their outputs
        self._started = 0

    def take(self, name: str, token_ids: list[int], finished: bool) -> tuple[ChunkRequest, int] | None:
        """Takes a step's output under this name.

        Returns the fork's chunk and the answer position at which these tokens begin, or None if it is no fork.
        """
        fork = self._forks.get(name)
        if fork is None:
            return None
        start, fork.fresh = fork.generated, bool(token_ids)
        fork.generated += len(token_ids)
        if finished:
            self._drop(name)
        return fork.chunk, start

    def fresh(self, chunk_id: str) -> list[Fork]:
        """Returns the forks of a chunk that need a draft now; each is returned once a step."""
        found = [fork for fork in self._forks.values() if fork.fresh and fork.chunk.chunk_id == chunk_id]
        for fork in found:
            fork.fresh = False
        return found

    def fit(self, running: dict[str, ChunkRequest]) -> None:
        """Stops forks before a step: those of ended chunks, and all of them when new chunks leave no room."""
        room = self._room(running)
        for name, fork in list(self._forks.items()):
            if not room or fork.chunk.chunk_id not in running:
                self._requests.abort(fork.request.request_id)
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._forget(self._forks.pop(name).request.request_id)

    def branch(self, chunk: ChunkRequest, answer: list[int], running: dict[str, ChunkRequest]) -> int:
        """Starts the forks of a decoding chunk if it has none and there is room. Returns the forks started so far."""
        left = len(chunk.token_ids) - chunk.prompt_tokens + chunk.max_tokens - len(answer)
        has_some = any(fork.chunk.chunk_id == chunk.chunk_id for fork in self._forks.values())
        if left < 2 * self._draft_tokens or has_some or not self._room(running):
            return self._started
        tokens = np.concatenate([chunk.token_ids[: chunk.prompt_tokens], np.array(answer, np.int32)])
        for path in range(1, self._paths):
            self._started += 1
            name = f"fork {self._started} of {chunk.chunk_id}"
            request = self._requests.add(name, chunk, tokens, left, self._kv)
            self._forks[name] = Fork(chunk, path, request, len(answer))
        return self._started

    def _room(self, running: dict[str, ChunkRequest]) -> bool:
        """Returns whether all these chunks may have all their forks without KV that the core has reserved."""
        if len(running) > self._most_running or len(running) * self._paths > self._max_running:
            return False
        blocks = sum(
            -(-(len(chunk.token_ids) + chunk.max_tokens + self._draft_tokens) // self._block_tokens)
            for chunk in running.values()
        )
        return blocks * self._paths <= self._capacity_blocks
