"""`Client`: an RL driver's handle to the service over HTTP, without Ray. Its calls are those of `RolloutClient` that
the gateway's routes carry, with the same arguments, results and errors.

    client = Client("http://127.0.0.1:8000", token=TOKEN)
    for group in client.rollout_blocking(batch): ...         or        async for group in client.rollout(batch): ...
    answer = await client.open(seed=7).generate(text=...)

A request names its samples by seed, step, group and index, so it is made again after a lost connection, with the same
tokens. 429 and 503 are asked again after their Retry-After. Once `resume_s` have passed, raises QuotaExceeded after
429, ConnectionError after 503 or a lost connection.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import httpx
from pydantic import BaseModel, ConfigDict

from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.own_adapters import OwnAdapters
from tailrace.app.calls.session import RolloutSession, new_session
from tailrace.app.http import bodies
from tailrace.app.http.adapters import GatewayAdapters
from tailrace.app.http.connections import Connections
from tailrace.app.http.gateway_connection import GatewayConnection
from tailrace.app.http.samples import GatewaySamples
from tailrace.app.http.trajectory import CapturedTrajectory
from tailrace.app.http.trajectory_groups import Play, Task, TrajectoryGroup, played_groups
from tailrace.app.http.weights import GatewayWeights, WeightInfo
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, WeightsLoaded


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


class GatewayHeartbeat:
    """Does nothing: the gateway keeps a session while one of its requests is open."""

    def __init__(self, beat: Callable[[], object]):
        pass

    def stop(self) -> None:
        pass


class Client:
    """`url`: the gateway's address. `token`: one of its `tokens_file`, whose role decides which calls are allowed.

    `resume_s`: seconds for which a call waits for a service that is unreachable or full. `max_open`: maximum number of
    open requests for samples; a group of a batch is one. `transport`: httpx's, for other ways than sockets. May be used
    from any thread; `close()` is optional. A forked process may use it too, and it may be pickled, with its token; each
    process makes its own connections.
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
        url = url.rstrip("/")
        self._connection = GatewayConnection(url, Connections(url, token, max_open, transport), resume_s)
        self._weights = GatewayWeights(self._connection)
        self._adapters = OwnAdapters(GatewayAdapters(self._connection))
        self._samples = GatewaySamples(self._connection, self._weights, self._adapters)

    def close(self) -> None:
        """Closes all connections, and with them the samples that are requested."""
        self._connection.close()

    # ---- samples -----------------------------------------------------------------------------------

    def open(self, batch_id: str | None = None, **settings) -> RolloutSession:
        """Opens a session; see `RolloutClient.open`. Raises ValueError for settings that HTTP does not carry.

        Its samples end by themselves or when their calls are cancelled: `RolloutSession.cancel` and `deadline_s` have
        no route. Sessions of equal seed and step share their samples.
        """
        session = new_session(self._samples, batch_id, settings, GatewayHeartbeat)
        bodies.check_carried(session.settings)
        return session

    async def rollout(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        """Rolls out a batch. Yields each group as it finishes, in any order. Closing the iterator ends its samples."""
        calls = [asyncio.ensure_future(self._samples.group(batch, group)) for group in batch.groups]
        try:
            for call in asyncio.as_completed(calls):
                yield await call
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    rollout_blocking = blocking_iterator(rollout)

    # ---- trajectories ------------------------------------------------------------------------------

    async def trajectory(self, **request) -> CapturedTrajectory:
        """Opens a trajectory: a base URL and a key for a harness, whose turns become training rows.

        `request`: `group`, `index`, `seed`, `step`, `weights_version`, `model`, `limits` (`turns`, `tokens`,
        `seconds`, `branches`, `image_bytes`) and `sampling`, as in `POST /v1/trajectories`. Raises RolloutRejected for
        others.
        """
        return CapturedTrajectory(self._connection, await self._connection.ask("POST", "/v1/trajectories", request))

    trajectory_blocking = blocking(trajectory)

    def trajectory_groups(
        self, tasks: Mapping[str, Task], play: Play, samples: int, at_once: int = 64, **request
    ) -> AsyncIterator[TrajectoryGroup]:
        """Plays `samples` trajectories of each task; yields each group as its last one ends, in any order.

        `tasks`: by name of the group. `play(trajectory, task)`: runs a harness; returns the reward, or None. An error
        that it raises is its trajectory's result. `at_once`: maximum number of open trajectories. `request`: as for
        `trajectory`. Closing the iterator ends all trajectories.
        """

        def opened(group: str, index: int) -> Awaitable[CapturedTrajectory]:
            return self.trajectory(group=group, index=index, **request)

        return played_groups(opened, tasks, play, samples, at_once)

    # ---- weights -----------------------------------------------------------------------------------

    async def update_weights(self, version: int, source: str) -> WeightsLoaded:
        """Loads the safetensors folder `source` on every replica; see `RolloutClient.update_weights`. Its path is the
        service's, and absolute. Raises WeightsRejected, with the reason.
        """
        return await self._weights.update(version, source)

    update_weights_blocking = blocking(update_weights)

    async def weight_info(self) -> WeightInfo:
        """Returns version and digest of the weights that are served."""
        return await self._weights.info()

    weight_info_blocking = blocking(weight_info)

    # ---- adapters ----------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Loads an adapter's folder on every replica, under a name; see `RolloutClient.load_adapter`. Its path is the
        service's, and absolute. Raises AdapterRejected, with the reason.
        """
        return await self._adapters.load(name, path)

    load_adapter_blocking = blocking(load_adapter)

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter's name; see `RolloutClient.unload_adapter`. Raises AdapterRejected if it is not loaded."""
        await self._adapters.unload(name)

    unload_adapter_blocking = blocking(unload_adapter)

    async def adapters(self) -> tuple[Adapter, ...]:
        """Returns the adapters that requests may name."""
        return await self._adapters.served()

    adapters_blocking = blocking(adapters)

    # ---- the service -------------------------------------------------------------------------------

    async def server_info(self) -> ServerInfo:
        """Returns model, weights version and replicas. The gateway has no route for all of `RolloutClient.status`."""
        return ServerInfo.model_validate(await self._connection.ask("GET", "/server_info"))

    server_info_blocking = blocking(server_info)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns token ids of a text, by the served model's tokenizer."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return tuple((await self._connection.ask("POST", "/tokenize", body))["tokens"])

    tokenize_blocking = blocking(tokenize)

    async def detokenize(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """Returns the text of token ids."""
        return (await self._connection.ask("POST", "/detokenize", {"tokens": list(token_ids)}))["prompt"]

    detokenize_blocking = blocking(detokenize)
