"""A driver that gives calls up and makes them again at once, under the same names; the last call wants the whole
answer.

Invariant: `HastySession` has the calls of a RolloutSession that drivers use here. Called by `drivers`.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from random import Random

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import StreamBroken
from tailrace.app.calls.session import RolloutSession
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.deployments.messages.session import SampleAnswer

PATIENCE_S = (0.0, 0.05, 0.3, 1.0, 5.0)
MOST = 3
"""Maximum number of calls that are given up, of one sample or batch."""


class HastySession:
    """A session whose calls are given up. `again`: called before each call that may make a sample again, with its
    arguments."""

    def __init__(self, session: RolloutSession, rng: Random, again: Callable[[dict], None]):
        self._session, self._rng, self._again = session, rng, again
        self.cancel = session.cancel

    async def generate(self, token_ids, **request) -> SampleAnswer:
        request |= {"token_ids": token_ids}
        for _ in range(self._rng.randint(0, MOST)):
            self._again(request)
            way = self._rng.choice((self._by_timeout, self._by_stream, self._by_another))
            answer = await way(request, self._rng.choice(PATIENCE_S) * (0.5 + self._rng.random()))
            if answer is not None:
                return answer
        return await self._session.generate(**request)

    async def _by_timeout(self, request: dict, patience_s: float) -> SampleAnswer | None:
        try:
            async with asyncio.timeout(patience_s):
                return await self._session.generate(**request)
        except TimeoutError:
            return None

    async def _by_stream(self, request: dict, patience_s: float) -> SampleAnswer | None:
        """Leaves a stream half-way. Returns the answer if it comes before that, or None."""
        try:
            async with asyncio.timeout(patience_s), aclosing(self._session.stream(**request)) as parts:
                async for part in parts:
                    if part.answer is not None:
                        return part.answer
        except (TimeoutError, StreamBroken):
            pass
        return None

    async def _by_another(self, request: dict, patience_s: float) -> SampleAnswer:
        """Makes two calls at the same time, of which the first one leaves. Returns the whole answer of the other."""
        first = asyncio.ensure_future(self._session.generate(**request))
        if self._rng.random() < 0.5:
            await asyncio.sleep(0)
        other = asyncio.ensure_future(self._session.generate(**request))
        try:
            await asyncio.sleep(patience_s)
            first.cancel()
            return await other
        finally:
            first.cancel(), other.cancel()
            await asyncio.gather(first, other, return_exceptions=True)


async def give_up(client: RolloutClient, batch: RolloutBatch, rng: Random, again: Callable[[], None]) -> None:
    """Requests a batch and leaves its stream half-way, several times."""
    for _ in range(rng.randint(0, MOST)):
        again()
        try:
            async with asyncio.timeout(rng.choice(PATIENCE_S)), aclosing(client.rollout(batch)) as groups:
                async for _ in groups:
                    if rng.random() < 0.3:
                        break
        except TimeoutError:
            pass
