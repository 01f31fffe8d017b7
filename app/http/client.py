"""`Client`: an RL driver's handle to the service over HTTP, without Ray. Its calls are those of `RolloutClient` that
the gateway's routes carry, with the same arguments, results and errors.

    client = Client("http://127.0.0.1:8000", token=TOKEN)
    for group in client.rollout_blocking(batch): ...         or        async for group in client.rollout(batch): ...
    answer = await client.open(seed=7).generate(text=...)

A request names its samples by seed, step, group and index, so it is made again after a lost connection, with the same
tokens. 429 and 503 are asked again after their Retry-After. Raises ConnectionError once `resume_s` have passed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from math import ceil

import httpx
from pydantic import BaseModel, ConfigDict

from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.refused import RolloutRejected, UnknownAdapter, WeightsRejected
from tailrace.app.calls.resume import Interrupted, Patience
from tailrace.app.calls.session import RolloutSession
from tailrace.app.calls.session_calls import SessionCalls
from tailrace.app.http import bodies
from tailrace.app.http.adapters import HttpAdapterCalls
from tailrace.app.http.connections import Connections
from tailrace.app.http.refused import LOST, BeyondContext, GivenUp, error_of, lost
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.rollout import BatchSettings, GroupResult, PromptGroup, RolloutBatch, WeightsLoaded
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest


class ServerInfo(BaseModel):
    """The service as the gateway reports it. `model`: its folder there; `max_model_len`: tokens of prompt and
    answer.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())
    tailrace: str
    model: str
    max_model_len: int
    logprobs_mode: str
    weights_version: int
    replicas: int


class WeightInfo(BaseModel):
    """The weights that are served. `digest`: names their content; empty until a replica has read it."""

    model_config = ConfigDict(frozen=True)
    version: int
    digest: str


class GatewayHeartbeat:
    """Does nothing: the gateway keeps a session while one of its requests is open."""

    def __init__(self, beat: Callable[[], object]):
        pass

    def stop(self) -> None:
        pass


class Client(SessionCalls, HttpAdapterCalls):
    """`url`: the gateway's address. `token`: one of its `tokens_file`, whose role decides which calls are allowed.

    `resume_s`: seconds for which a call waits for a service that is unreachable or full. `max_open`: maximum number of
    open requests; a group of a batch is one. `transport`: httpx's, for other ways than sockets. May be used from any
    thread; `close()` is optional. A forked process may use it too, and it may be pickled, with its token; each process
    makes its own connections.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        resume_s: float = 600.0,
        max_open: int = 512,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url {url!r}: give http://HOST:PORT, or https")
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise ValueError("token: give one word of printable ASCII, as in the gateway's tokens_file")
        self._url, self._resume_s, self._heartbeat = url.rstrip("/"), resume_s, GatewayHeartbeat
        self._connections = Connections(self._url, token, max_open, transport)
        self._weights: tuple[int, str] | None = None  # version and folder of this client's last update
        self._adapters: dict[str, Adapter] = {}

    def close(self) -> None:
        """Closes all connections, and with them the samples that are requested."""
        self._connections.close()

    # ---- samples -----------------------------------------------------------------------------------

    def open(self, batch_id: str | None = None, **settings) -> RolloutSession:
        """Opens a session; see `RolloutClient.open`. Raises ValueError for settings that HTTP does not carry.

        Its samples end by themselves or when their calls are cancelled: `RolloutSession.cancel` and `deadline_s` have
        no route. Sessions of equal seed and step share their samples.
        """
        session = super().open(batch_id, **settings)
        bodies.check_carried(session.settings)
        return session

    async def rollout(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        """Rolls out a batch. Yields each group as it finishes, in any order. Closing the iterator ends its samples."""
        calls = [asyncio.ensure_future(self._group(batch, group)) for group in batch.groups]
        try:
            for call in asyncio.as_completed(calls):
                yield await call
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    rollout_blocking = blocking_iterator(rollout)

    async def _group(self, batch: RolloutBatch, group: PromptGroup) -> GroupResult:
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

    async def _samples(self, settings: BatchSettings, group: PromptGroup, index: int, count: int) -> list[SampleAnswer]:
        try:
            return await self._patiently(self._answers, settings, group, index, count)
        except GivenUp as error:
            if count == 1:
                return [bodies.failed_answer(settings, group, index, str(error))]
            each = [self._samples(settings, group, one, 1) for one in range(index, index + count)]
            return [answer for (answer,) in await asyncio.gather(*each)]

    async def _generate_once(self, settings: BatchSettings, request: SampleRequest, resumed: bool) -> SampleAnswer:
        if request.deadline_s is not None:
            raise ValueError("deadline_s: HTTP does not carry it; cancel the call instead")
        try:
            turn = request.turn, ceil(request.hold_s)
            (answer,) = await self._answers(settings, request.group, request.index, 1, *turn)
        except GivenUp as error:
            return bodies.failed_answer(settings, request.group, request.index, str(error))
        return answer

    async def _stream_once(self, settings: BatchSettings, request: SampleRequest, resumed: bool):
        raise NotImplementedError("stream: this client gives whole answers; ask the route with `stream`")
        yield

    async def _answers(
        self, settings: BatchSettings, group: PromptGroup, index: int, count: int, turn: int = 0, hold_s: int = 0
    ) -> list[SampleAnswer]:
        """Requests `count` samples of a group from `index` on, in one request."""
        bodies.check_carried(settings)
        if settings.weights_version is not None:
            await self._expect(settings.weights_version)
        path, body = bodies.request_of(group, count)
        headers = bodies.named(settings, group.prompt_id, index, turn, hold_s)
        try:
            found = await self._once("POST", path, body, headers)
        except BeyondContext:
            context = ServerInfo.model_validate(await self._once("GET", "/server_info", None, {})).max_model_len
            if group.max_tokens <= context:
                raise
            return await self._answers(
                settings, group.model_copy(update={"max_tokens": context}), index, count, turn, hold_s
            )
        except UnknownAdapter as error:
            raise Interrupted(error) if await self._load_again([group.adapter]) else error from None
        answers = bodies.answers_of(found, settings, group.prompt_id)
        await self._check_versions(settings, answers)
        return answers

    # ---- weights -----------------------------------------------------------------------------------

    async def _expect(self, version: int) -> None:
        """Raises RolloutRejected if other weights are served, and this client cannot load them."""
        served = (await self.weight_info()).version
        if served == version:
            return
        if self._weights is None or self._weights[0] != version or served > version:
            raise RolloutRejected(f"weights_version {version} is asked for, and the service holds {served}")
        await self.update_weights(*self._weights)  # the service was restarted

    async def _check_versions(self, settings: BatchSettings, answers: list[SampleAnswer]) -> None:
        """Raises an error if tokens are of lower weights than the settings or this client's last update allow."""
        own = self._weights[0] if self._weights else 0
        lowest = max(settings.min_weights_version, own)
        made_by = min((part.weights_version for one in answers for part in one.sample.segments), default=lowest)
        if made_by >= lowest:
            return
        refused = RolloutRejected(f"the service holds weights {made_by}, and {lowest} or higher is asked for")
        if self._weights is None or own < lowest:
            raise refused
        await self.update_weights(*self._weights)  # the service was restarted
        raise Interrupted(refused)

    async def update_weights(self, version: int, source: str) -> WeightsLoaded:
        """Loads the safetensors folder `source` on every replica; see `RolloutClient.update_weights`. Its path is the
        service's, and absolute. Raises WeightsRejected, with the reason.
        """
        try:
            await self._ask("POST", "/update_weights", {"weight_dir": str(source), "version": version})
        except (RolloutRejected, GivenUp) as error:
            raise WeightsRejected(str(error)) from error
        self._weights = version, str(source)
        return WeightsLoaded(version=version, digest=(await self.weight_info()).digest, replicas=())

    update_weights_blocking = blocking(update_weights)

    async def weight_info(self) -> WeightInfo:
        """Returns version and digest of the weights that are served."""
        found = await self._ask("GET", "/weight_info")
        return WeightInfo(version=int(found["weight_version"]), digest=found["weights_digest"])

    weight_info_blocking = blocking(weight_info)

    # ---- the service -------------------------------------------------------------------------------

    async def server_info(self) -> ServerInfo:
        """Returns model, weights version and replicas. The gateway has no route for all of `RolloutClient.status`."""
        return ServerInfo.model_validate(await self._ask("GET", "/server_info"))

    server_info_blocking = blocking(server_info)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns token ids of a text, by the served model's tokenizer."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return tuple((await self._ask("POST", "/tokenize", body))["tokens"])

    tokenize_blocking = blocking(tokenize)

    async def detokenize(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """Returns the text of token ids."""
        return (await self._ask("POST", "/detokenize", {"tokens": list(token_ids)}))["prompt"]

    detokenize_blocking = blocking(detokenize)

    # ---- for `RolloutSession` ----------------------------------------------------------------------

    async def cancel_samples(self, session: str, group: str | None, index: int | None) -> int:
        """Raises NotImplementedError: no route carries it."""
        raise NotImplementedError("cancel: HTTP does not carry it; cancel the calls, or close the session")

    cancel_samples_blocking = blocking(cancel_samples)

    def renew_session(self, session: str) -> None:
        """Does nothing, see `GatewayHeartbeat`."""

    async def close_session(self, session: str) -> bool:
        """Returns True; nothing is closed: the service closes a session a minute after its last request."""
        return True

    close_session_blocking = blocking(close_session)

    # ---- requests ----------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, body: dict | None = None) -> dict:
        return await self._patiently(self._once, method, path, body, {})

    async def _patiently(self, call: Callable, *arguments):
        """Returns the result of a call, which is repeated while the service is unreachable or full."""
        patience = Patience(self._resume_s)
        while True:
            try:
                return await call(*arguments)
            except Interrupted as broken:
                await patience.wait(broken)

    async def _once(self, method: str, path: str, body: dict | None, headers: dict) -> dict:
        try:
            answer = await self._connections.ask(method, path, body, headers)
        except LOST as error:
            raise lost(self._url, error) from error
        if not answer.is_success:
            raise error_of(answer)
        try:
            return answer.json()
        except ValueError as error:
            raise ValueError(f"{answer.url}: the answer is not of a gateway of Tailrace") from error
