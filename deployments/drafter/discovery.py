"""Which drafters there are, asked of Serve every second; a task of the engine replica's event loop.

Invariant: whatever becomes of the drafters, this only ever tells the engine of fewer. A drafter that hangs keeps the
answers of all back, so the last known ones count until its health check has replaced it.
"""

import asyncio

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.drafter.server import Address
from tailrace.deployments.router import poll_all

LOOK_S = 1.0


async def watch(handle: DeploymentHandle, drafters: Drafters) -> None:
    """For ever: `handle` is of the Drafter deployment."""
    while True:
        try:
            answers = await poll_all(handle, "address", 2 * LOOK_S)
            drafters.meet([answer for answer in answers if isinstance(answer, Address)])
        except (TimeoutError, RayError):
            pass
        await asyncio.sleep(LOOK_S)
