"""One reading of a service: its status with its longest samples."""

import asyncio

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.status import SampleStatus, ServiceStatus


async def look(client: RolloutClient, longest: int) -> tuple[ServiceStatus, tuple[SampleStatus, ...]]:
    """Returns status and longest samples. `longest`: number of samples. Raises as the client's calls do."""
    status, samples = await asyncio.gather(client.status(), client.longest_samples(longest))
    return status, samples
