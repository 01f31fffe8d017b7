"""The gateway's access to the service: a client for each role, sessions, and the model's name and tokenizer.

Invariant: of a request only the token ids of its chat and the names of its images outlive it here, within limits.
Sessions belong to the coordinator, and are closed there once idle.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import NamedTuple

from cachetools import LRUCache

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.single_samples import SingleSamples
from tailrace.app.gateway.chat.answer_parser import AnswerParser
from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.chat.conversations import AnsweredTurns, Conversations
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.edge.errors import UnknownModel
from tailrace.app.gateway.gateway_config import CONVERSATION_TOKENS, GatewayConfig
from tailrace.app.gateway.images.image_processor import ImageProcessor
from tailrace.app.gateway.naming import Naming
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.messages.liveness import RENEW_S
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import PromptGroup, SamplingParams, WeightsLoaded
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest, SampleTokens
from tailrace.deployments.staging.slots import is_memory, memory_source, slot_of

MAX_SAMPLES = 1_024
"""Maximum number of samples of one request: each costs the gateway 0.1 ms of its event loop before others have their
turn.
"""

MAX_SENT_IMAGES = 65_536
"""Maximum number of images of which a gateway remembers that it has sent them: 10 MB of names."""


CHECK_S = 5.0
"""Maximum seconds to wait for the service's model in a check of this gateway, which Serve gives 30 s."""


class ServedModel(NamedTuple):
    """`name`: the model's name in requests, the folder's last part. `adapter`: the adapter of a request which names one
    instead. `images`: processes those of chats; None for a model of text alone.
    """

    name: str
    root: str
    max_model_len: int
    prompts: Prompts
    parser: AnswerParser | None = None
    adapter: str | None = None
    images: ImageProcessor | None = None


class Wanted(NamedTuple):
    """Samples of one HTTP request. `prompts`: in the format of a PromptGroup; `n`: samples of each. `max_tokens`: None
    for as many as the model's context has room for. `chunk_tokens`: maximum tokens of an event of a stream. `adapter`:
    its name. `images`: names of the prompts' images, if their processor has named them by their content.
    """

    prompts: Sequence[Mapping]
    n: int
    max_tokens: int | None
    sampling: SamplingParams
    chunk_tokens: int | None = None
    adapter: str | None = None
    images: Sequence[str] = ()


class GatewayService:
    """`client_of`: makes the client of a role."""

    def __init__(self, client_of: Callable[[Role], RolloutClient], config: GatewayConfig):
        self._client_of, self._config = client_of, config
        self._conversations = Conversations(CONVERSATION_TOKENS)
        self._sent_images: LRUCache[str, bool] = LRUCache(MAX_SENT_IMAGES)
        self._clients: dict[Role, RolloutClient] = {}
        self._model: ServedModel | None = None
        self._adapters: set[str] = set()
        self._loading: asyncio.Task | None = None
        self._open: Counter[str] = Counter()  # requests by session
        self._renewing: asyncio.Task | None = None

    def client(self, role: Role) -> RolloutClient:
        if role not in self._clients:
            self._clients[role] = self._client_of(role)
        return self._clients[role]

    async def model(self, wanted: str | None = None) -> ServedModel:
        """Returns the served model, or an adapter of it. Raises UnknownModel if a request names another one."""
        while self._model is None:
            if self._loading is None:
                self._loading = asyncio.ensure_future(self._load())
                self._loading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # read by callers
            await asyncio.shield(self._loading)  # a caller may leave; no two threads may import transformers
        if wanted in (None, self._model.name, self._model.root):
            return self._model
        if wanted not in self._adapters:  # as of the last look; the service itself refuses one that is gone
            self._adapters = {one.name for one in await self.client(Role.OBSERVER).adapters()}
        if wanted not in self._adapters:
            names = ", ".join(map(repr, (self._model.name, *sorted(self._adapters))))
            served = f"{names} {'are' if self._adapters else 'is'} served"
            raise UnknownModel(f"The model `{wanted}` does not exist; {served}")
        return self._model._replace(name=wanted, adapter=wanted)

    async def check_model(self) -> None:
        """Raises RuntimeError if the service has another model, or context, than the one that was loaded here."""
        if (loaded := self._model) is None:
            return
        try:
            async with asyncio.timeout(CHECK_S):
                status = await self.client(Role.OBSERVER).status()
        except Exception:  # noqa: BLE001 - the service is unreachable: requests say so
            return
        if (status.model, status.max_model_len) != (loaded.root, loaded.max_model_len):
            raise RuntimeError(f"the service has {status.model}, and this gateway has loaded {loaded.root}")

    async def _load(self) -> None:
        try:
            status = await self.client(Role.OBSERVER).status()
            self._model = await asyncio.to_thread(self._read, status.model, status.max_model_len)
        finally:  # as it ends, not after: a caller that finds an ended load would not wait, and loop for ever
            self._loading = None

    def _read(self, folder: str, max_model_len: int) -> ServedModel:
        prompts, names = Prompts(folder, max_model_len), (self._config.tool_parser, self._config.reasoning_parser)
        parser = AnswerParser(*names, prompts.tokenizer) if any(names) else None
        images = ImageProcessor(folder) if prompts.is_multimodal else None
        return ServedModel(Path(folder).name, folder, max_model_len, prompts, parser, images=images)

    async def chat(self, request: ChatRequest, turns: AnsweredTurns | None = None) -> Chat:
        """Returns the chat of a request. `turns`: those that it may continue, by default all that were answered here.
        Raises ValueError, one line, if the request cannot be met.
        """
        model, known = await self.model(request.model), self._conversations if turns is None else turns
        thread = None if model.images is None else model.images.thread_for(request.has_images)
        arguments = request, model.prompts, known, model.parser, model.images
        return await asyncio.get_running_loop().run_in_executor(thread, Chat, *arguments)

    async def generate(self, role: Role, wanted: Wanted, naming: Naming) -> list[list[SampleAnswer]]:
        """Returns the samples of each prompt. Cancelling the call ends them."""
        settings, asked = naming.session(), await self._asked(wanted, naming)
        with self._renewed(settings.batch_id):
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._calls(role, wanted).generate(settings, one)) for one in asked]
        answers = [call.result() for call in calls]
        return [answers[start : start + wanted.n] for start in range(0, len(answers), wanted.n)]

    async def stream(self, role: Role, wanted: Wanted, naming: Naming) -> AsyncIterator[tuple[int, SampleTokens]]:
        """Yields the samples' parts as they arrive, each with the number of its sample. Closing the iterator ends
        them.
        """
        settings, asked = naming.session(), await self._asked(wanted, naming)
        items: asyncio.Queue = asyncio.Queue()

        async def read(number: int, request: SampleRequest, calls: SingleSamples) -> None:
            try:
                async with aclosing(calls.stream(settings, request)) as parts:
                    async for part in parts:
                        items.put_nowait((number, part))
                items.put_nowait((number, None))
            except Exception as error:  # noqa: BLE001 - passed to the reader of all samples
                items.put_nowait((number, error))

        with self._renewed(settings.batch_id):
            readers = [
                asyncio.ensure_future(read(number, one, self._calls(role, wanted))) for number, one in enumerate(asked)
            ]
            try:
                left = len(readers)
                while left:
                    number, part = await items.get()
                    if isinstance(part, Exception):
                        raise part
                    if part is None:
                        left -= 1
                    else:
                        yield number, part
            finally:
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)

    def _calls(self, role: Role, wanted: Wanted) -> SingleSamples:
        """Returns the calls of a sample, which is asked for next. Images whose data went to the service before have
        none, unless it asks for them.
        """
        had = frozenset(name for name in wanted.images if self._sent_images.get(name))
        self._sent_images.update(dict.fromkeys(wanted.images, True))
        return self.client(role).samples.after(had)

    async def _asked(self, wanted: Wanted, naming: Naming) -> list[SampleRequest]:
        if len(wanted.prompts) * wanted.n > MAX_SAMPLES:
            raise ValueError(
                f"prompt: {len(wanted.prompts)} prompts, n is {wanted.n}; a request is for {MAX_SAMPLES} samples"
            )
        bound = wanted.max_tokens or (await self.model()).max_model_len
        groups = [(naming.group_of(prompt), prompt) for prompt in wanted.prompts for _ in range(wanted.n)]
        numbers = defaultdict(count)  # equal prompts are samples of one group, each with an index of its own
        return [
            SampleRequest(
                group=PromptGroup(
                    prompt_id=group,
                    samples=1,
                    max_tokens=bound,
                    sampling=wanted.sampling,
                    adapter=wanted.adapter,
                    **prompt,
                ),
                index=naming.index + next(numbers[group]),
                turn=naming.turn,
                together=len(wanted.prompts) * wanted.n,
                hold_s=naming.hold_s,
                branches=naming.branches,
                chunk_tokens=wanted.chunk_tokens,
            )
            for group, prompt in groups
        ]

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
                with contextlib.suppress(Exception):  # the service is unreachable; the requests themselves raise
                    self.client(Role.EVALUATOR).samples.renew(session)

    async def update_weights(self, role: Role, folder: str, version: int | None) -> WeightsLoaded:
        """Loads a folder under `version`, or under the next one. Raises ValueError for weights in the memory of another
        machine.
        """
        if is_memory(folder):
            check_here(folder)
        client = self.client(role)
        if version is None:
            version = (await client.status()).weights_version + 1
        return await client.update_weights(version, folder)


def check_here(source: str) -> None:
    """Raises ValueError if weights in memory are not on the gateway's machine: replicas would not find them."""
    if slot_of(memory_source(source)) is None:
        raise ValueError(f"{source} is not in the memory of the gateway's machine; stage it there, or give a folder")
