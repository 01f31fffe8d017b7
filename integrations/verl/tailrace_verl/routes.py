"""Routed experts of a sample, for verl's replay of them in the trainer (R3).

Invariant: one row for each token of the whole context, prompt and answer, but the last, which no pass has computed.
verl keeps those of a trajectory's last turn alone. Called by the server.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np

from tailrace.deployments.messages.rollout import PromptGroup, SampleResult
from tailrace.deployments.messages.status import ServiceSnapshot
from tailrace_verl.requests import Asked

KEY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
KEEP = "give the service's engine vllm_args: {enable_return_routed_experts: true}"
REPORT_S = 120.0
"""How long a service that starts may take to its first replica's report. A sample without routes is an error, too."""


async def check_kept(status: Callable[[], Awaitable[ServiceSnapshot]]) -> None:
    """Raises ValueError, one line, if a replica that has reported keeps no routes. `status`: of the service."""
    until_s = time.monotonic() + REPORT_S
    while not (reported := [one for one in (await status()).replicas if one.observed_s is not None]):
        if time.monotonic() > until_s:
            return
        await asyncio.sleep(1)
    for one in reported:
        if not one.keeps_routes:
            raise ValueError(f"{KEY}: replica {one.replica_id} keeps no routed experts; {KEEP}")


def routes(asked: Asked, sample: SampleResult) -> np.ndarray | None:
    """uint8 or uint16 [tokens, layers, experts of a token]; None if they are not whole."""
    found, context = sample.routed_experts, len(asked.group.token_ids) + len(sample.token_ids)
    return found.array if found is not None and len(found) == context - 1 else None


def context_of(asked: Asked, sample: SampleResult) -> Asked:
    """A request whose routes are those of `sample`: its context without the last token, and one more token."""
    context = (*asked.group.token_ids, *sample.token_ids[:-1])
    name = f"{asked.group.prompt_id}.{asked.index}.routes"
    return Asked(PromptGroup(prompt_id=name, token_ids=context, samples=1, max_tokens=1), 0, asked.step, asked.keyed_by)
