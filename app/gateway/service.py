"""The service as the gateway reaches it: a client for each role, sessions, and the model's name and tokenizer.

Invariant: nothing of a request outlives it here; sessions are the coordinator's, and are closed there once idle.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tailrace.app.calls.client import RolloutClient
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import Sampled
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.messages.liveness import RENEW_S
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import PromptGroup
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest

MAX_SAMPLES = 1_024
"""Of one request: each costs the gateway 0.1 ms of its event loop before others have their turn."""


class ServedModel(NamedTuple):
    """`name`: as requests give it, the folder's last part."""

    name: str
    root: str
    max_model_len: int
    prompts: Prompts


class UnknownModel(ValueError):
    """A request names a model that is not served."""


class GatewayService:
    """`client_of`: makes the client of a role."""

    def __init__(self, client_of: Callable[[Role], RolloutClient]):
        self._client_of = client_of
        self._clients: dict[Role, RolloutClient] = {}
        self._model: ServedModel | None = None
        self._loading: asyncio.Task | None = None
        self._open: Counter[str] = Counter()  # requests by session
        self._renewing: asyncio.Task | None = None

    def client(self, role: Role) -> RolloutClient:
        if role not in self._clients:
            self._clients[role] = self._client_of(role)
        return self._clients[role]

    async def model(self, wanted: str | None = None) -> ServedModel:
        """The served model. Raises UnknownModel if a request wants another one."""
        while self._model is None:
            if self._loading is None:
                self._loading = asyncio.ensure_future(self._load())
                self._loading.add_done_callback(self._loaded)
            await asyncio.shield(self._loading)  # a caller may leave; no two threads may import transformers
        if wanted not in (None, self._model.name, self._model.root):
            raise UnknownModel(f"model {wanted!r} is not served; {self._model.name!r} is")
        return self._model

    async def _load(self) -> ServedModel:
        status = await self.client(Role.OBSERVER).status()
        prompts = await asyncio.to_thread(Prompts, status.model, status.max_model_len)
        return ServedModel(Path(status.model).name, status.model, status.max_model_len, prompts)

    def _loaded(self, task: asyncio.Task) -> None:
        self._loading = None
        if not task.cancelled() and task.exception() is None:
            self._model = task.result()

    async def generate(
        self, role: Role, request: Sampled, prompts: Sequence[Mapping], max_tokens: int | None, naming: Naming
    ) -> list[list[SampleAnswer]]:
        """The samples of each prompt, `request.n` of each. A call that is cancelled ends them."""
        if len(prompts) * request.n > MAX_SAMPLES:
            raise ValueError(
                f"prompt: {len(prompts)} prompts, n is {request.n}; a request is for {MAX_SAMPLES} samples"
            )
        bound, sampling = max_tokens or (await self.model()).max_model_len, request.sampling()
        settings = naming.session()
        asked = [
            SampleRequest(
                group=PromptGroup(
                    prompt_id=naming.group_of(prompt), samples=1, max_tokens=bound, sampling=sampling, **prompt
                ),
                index=naming.index + number,
            )
            for prompt in prompts
            for number in range(request.n)
        ]
        with self._renewed(settings.batch_id):
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self.client(role).generate(settings, one)) for one in asked]
        answers = [call.result() for call in calls]
        return [answers[start : start + request.n] for start in range(0, len(answers), request.n)]

    @contextlib.contextmanager
    def _renewed(self, session: str):
        """Keeps a session's lease while a request is open."""
        self._open[session] += 1
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        try:
            yield
        finally:
            self._open[session] -= 1
            if not self._open[session]:
                del self._open[session]

    async def _renew(self) -> None:
        while self._open:
            await asyncio.sleep(RENEW_S)
            for session in list(self._open):
                with contextlib.suppress(Exception):  # the service is away; the requests themselves say so
                    self.client(Role.EVALUATOR).renew_session(session)

    async def update_weights(self, role: Role, folder: str, version: int | None) -> int:
        """Load a folder under `version`, or under the next one. Returns it."""
        client = self.client(role)
        if version is None:
            version = (await client.status()).weights_version + 1
        return (await client.update_weights(version, folder)).version


def first_cause(error: BaseException) -> BaseException:
    """The first error inside of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
