"""Discovery of drafters: polls Serve every LOOK_S, as a task of the engine replica's event loop.

Invariant: failures of drafters only reduce the engine's list. A hanging drafter delays all answers, so the last known
ones count until its health check has replaced it.
"""

import asyncio

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.router import poll_all

LOOK_S = 2.0
"""Seconds between two polls: a new drafter gets work, and a lost one loses it, after that long. Samples of a silent
drafter continue without it after `patience_s`. A poll costs each engine 2 to 3 ms.
"""

ANSWER_S = 2.0


async def watch(handle: DeploymentHandle, drafters: Drafters) -> None:
    """Updates `drafters` until cancelled. `handle`: handle of the Drafter deployment."""
    while True:
        try:
            answers = await poll_all(handle, "address", ANSWER_S)
            drafters.meet([answer for answer in answers if isinstance(answer, Address)])
        except (TimeoutError, RayError):
            pass
        await asyncio.sleep(LOOK_S)
