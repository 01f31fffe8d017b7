"""Discovery of drafters: polls Serve every second, as a task of the engine replica's event loop.

Invariant: failures of drafters only reduce the engine's list. A hanging drafter delays all answers, so the last known
ones count until its health check has replaced it.
"""

import asyncio

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.router import poll_all

LOOK_S = 1.0


async def watch(handle: DeploymentHandle, drafters: Drafters) -> None:
    """Update `drafters` until cancelled. `handle`: of the Drafter deployment."""
    while True:
        try:
            answers = await poll_all(handle, "address", 2 * LOOK_S)
            drafters.meet([answer for answer in answers if isinstance(answer, Address)])
        except (TimeoutError, RayError):
            pass
        await asyncio.sleep(LOOK_S)
