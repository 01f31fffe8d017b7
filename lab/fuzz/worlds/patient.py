"""A driver's session under quotas: it repeats the request for a refused sample until the sample fits.

Invariant: it has the calls of a RolloutSession that drivers use here. Called by `drivers`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from tailrace.app.calls.refused import QuotaExceeded
from tailrace.app.calls.session import RolloutSession
from tailrace.deployments.messages.session import SampleAnswer, SampleTokens

AGAIN_S = 2.0


class PatientSession:
    def __init__(self, session: RolloutSession):
        self._session, self.cancel = session, session.cancel

    async def generate(self, token_ids, **request) -> SampleAnswer:
        while True:
            try:
                return await self._session.generate(token_ids, **request)
            except QuotaExceeded:
                await asyncio.sleep(AGAIN_S)

    async def stream(self, token_ids, **request) -> AsyncIterator[SampleTokens]:
        while True:
            try:
                async with aclosing(self._session.stream(token_ids, **request)) as parts:
                    given: list[int] = []
                    async for part in parts:
                        given += part.token_ids
                        if part.answer is not None and [*part.answer.sample.token_ids] != given:
                            raise AssertionError(f"a stream gave {given}, its answer is {part.answer.sample.token_ids}")
                        yield part
                return
            except QuotaExceeded:
                await asyncio.sleep(AGAIN_S)
