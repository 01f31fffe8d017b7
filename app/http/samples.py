"""Samples over HTTP: one request for some samples of a prompt, made again under the same names after a loss."""

import asyncio
from collections.abc import AsyncIterator
from math import ceil

from tailrace.app.calls.own_adapters import OwnAdapters
from tailrace.app.calls.refused import UnknownAdapter
from tailrace.app.calls.resume import Interrupted
from tailrace.app.http import bodies
from tailrace.app.http.gateway_connection import GatewayConnection
from tailrace.app.http.refused import BeyondContext, GivenUp
from tailrace.app.http.weights import GatewayWeights
from tailrace.deployments.messages.rollout import BatchSettings, GroupResult, PromptGroup, RolloutBatch
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest, SampleTokens


class GatewaySamples:
    """Groups of batches, and the calls of `SampleCalls` for sessions. `weights`, `adapters`: this client's."""

    def __init__(self, connection: GatewayConnection, weights: GatewayWeights, adapters: OwnAdapters):
        self._connection, self._weights, self._adapters = connection, weights, adapters

    async def group(self, batch: RolloutBatch, group: PromptGroup) -> GroupResult:
        """Returns a whole group of a batch. Samples that the service gave up have their error."""
        starts = range(0, group.samples, bodies.MAX_SAMPLES_OF_REQUEST)
        counts = [min(bodies.MAX_SAMPLES_OF_REQUEST, group.samples - start) for start in starts]
        parts = [self._samples(batch, group, start, count) for start, count in zip(starts, counts, strict=True)]
        answers = [answer for part in await asyncio.gather(*parts) for answer in part]
        return GroupResult(
            batch_id=batch.batch_id,
            prompt_id=group.prompt_id,
            prompt_token_ids=max((answer.prompt_token_ids for answer in answers), key=len),  # a failed one has none
            samples=tuple(answer.sample for answer in answers),
            step=batch.step,
        )

    async def generate(self, settings: BatchSettings, request: SampleRequest) -> SampleAnswer:
        """Generates one sample. Cancelling the call ends the sample."""
        if request.deadline_s is not None:
            raise ValueError("deadline_s: HTTP does not carry it; cancel the call instead")
        turn = request.turn, ceil(request.hold_s)
        (answer,) = await self._samples(settings, request.group, request.index, 1, *turn)
        return answer

    async def stream(self, settings: BatchSettings, request: SampleRequest) -> AsyncIterator[SampleTokens]:
        """Raises NotImplementedError: this client reads whole answers."""
        raise NotImplementedError("stream: this client gives whole answers; ask the route with `stream`")
        yield

    async def cancel(self, session: str, group: str | None, index: int | None) -> int:
        """Raises NotImplementedError: no route carries it."""
        raise NotImplementedError("cancel: HTTP does not carry it; cancel the calls, or close the session")

    def renew(self, session: str) -> None:
        """Does nothing: the gateway keeps a session while one of its requests is open."""

    async def close(self, session: str) -> bool:
        """Returns True; nothing is closed: the service closes a session a minute after its last request."""
        return True

    async def _samples(
        self, settings: BatchSettings, group: PromptGroup, index: int, count: int, turn: int = 0, hold_s: int = 0
    ) -> list[SampleAnswer]:
        """Returns `count` samples of a group from `index` on. If the service gives up their request, each is requested
        by itself.
        """
        try:
            return await self._connection.repeated(self._answers, settings, group, index, count, turn, hold_s)
        except GivenUp as error:
            if count == 1:
                return [bodies.failed_answer(settings, group, index, str(error))]
            each = [self._samples(settings, group, one, 1) for one in range(index, index + count)]
            return [answer for (answer,) in await asyncio.gather(*each)]

    async def _answers(
        self, settings: BatchSettings, group: PromptGroup, index: int, count: int, turn: int, hold_s: int
    ) -> list[SampleAnswer]:
        """Requests `count` samples of a group from `index` on, in one request."""
        bodies.check_carried(settings)
        if settings.weights_version is not None:
            await self._weights.expect(settings.weights_version)
        path, body = bodies.request_of(group, count)
        headers = bodies.named(settings, group.prompt_id, index, turn, hold_s)
        lowest = self._weights.lowest(settings)
        try:
            found = await self._connection.once("POST", path, body, headers)
        except BeyondContext:
            context = int((await self._connection.once("GET", "/server_info", None))["max_model_len"])
            if group.max_tokens <= context:
                raise
            shorter = group.model_copy(update={"max_tokens": context})
            return await self._answers(settings, shorter, index, count, turn, hold_s)
        except UnknownAdapter as error:
            has_it = await self._adapters.restore([group.adapter], settings.min_adapter_versions)
            raise Interrupted(error) if has_it else error from None
        answers = bodies.answers_of(found, settings, group.prompt_id)
        await self._weights.check(settings, lowest, answers)
        return answers
