"""The samples of a batch over HTTP, from several clients at once: `run.clients` of `tailrace.http`, without Ray.

Each sample is a separate request; in random order they go to one client or another. Called by
lab/verification/tokens.py.
"""

from contextlib import AsyncExitStack, closing
from random import Random

from tailrace.app.calls.session import groups_of_answers
from tailrace.app.http.client import Client
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch
from tailrace.lab.verification.asking import SEED, opened, shuffled, submit


async def over_http(url: str, clients: int, batch: RolloutBatch) -> tuple[list[GroupResult], str]:
    """Returns the groups of a batch, and a note of each client's requests; empty if one had none. `url`: of the
    gateway.
    """
    rng, requests = Random(SEED), [0] * clients
    async with AsyncExitStack() as stack:
        connected = [stack.enter_context(closing(Client(url))) for _ in requests]
        sessions = [await stack.enter_async_context(opened(client, batch)) for client in connected]
        for group, index in shuffled(batch):
            number = rng.randrange(clients)
            submit(sessions[number], group, index)
            requests[number] += 1
        answers = [answer for session in sessions async for answer in session.samples()]
    note = f"{clients} clients of HTTP made {', '.join(map(str, requests))} requests" if all(requests) else ""
    return list(groups_of_answers(answers).values()), note
