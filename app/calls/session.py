"""Open sessions of a client: single samples, asked for at any time.

    async with client.open(seed=7, step=3) as session:
        answer = await session.generate(text="2 + 2 =", group="sum", max_tokens=32)     # one sample, once it has ended
        session.submit(messages=[{"role": "user", "content": "Hello"}])                 # begins one, for `samples`
        async for answer in session.samples(): ...                                      # as they end
        async for part in session.stream(text="2 + 2 ="): ...                           # one sample, as its chunks end

Tokens depend on seed, step, group, index and turn alone: they are those of a `RolloutBatch` with such a prompt_id. A
request without an index is the next one of its group, in the order of the calls.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple, Protocol
from uuid import uuid4

from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.features.wire import Features
from tailrace.deployments.messages.rollout import (
    BatchSettings,
    GroupResult,
    PromptGroup,
    PromptLogprobs,
    SamplingParams,
)
from tailrace.deployments.messages.session import STREAM_CHUNK_TOKENS, SampleAnswer, SampleRequest, SampleTokens


class SampleCalls(Protocol):
    """A service's calls for single samples. `session`: its `batch_id`."""

    async def generate(self, settings: BatchSettings, request: SampleRequest) -> SampleAnswer: ...

    def stream(self, settings: BatchSettings, request: SampleRequest) -> AsyncIterator[SampleTokens]: ...

    async def cancel(self, session: str, group: str | None, index: int | None) -> int: ...

    def renew(self, session: str) -> object: ...

    async def close(self, session: str) -> bool: ...


class Scored(NamedTuple):
    """`prompt`: logprobs of the tokens from the second on. The other fields name the weights that they were computed
    under.
    """

    prompt: PromptLogprobs
    weights_version: int
    weights_digest: str


class RolloutSession:
    """See the module docstring. Made by `RolloutClient.open`. The service closes it a minute after its process has
    gone.
    """

    def __init__(self, calls: SampleCalls, settings: BatchSettings, heartbeat: Callable[[Callable], object]):
        self.settings = settings
        self._calls = calls
        self._counts: Counter[str] = Counter()  # requests by group
        self._numbering = Lock()  # blocking twins number their requests on several threads
        self._tasks: dict[asyncio.Task, None] = {}  # an ordered set
        self._ended: asyncio.Queue[asyncio.Task] = asyncio.Queue()
        self._unread = 0  # submitted samples that `samples` has not yielded
        self._heartbeat = heartbeat(lambda: calls.renew(settings.batch_id))
        self._is_closed = False

    async def generate(self, token_ids: Sequence[int] | None = None, **request) -> SampleAnswer:
        """Generates one sample. Cancelling the call ends the sample.

        Give one of `token_ids`, `text`, `messages`. `group`: a name, by default that of equal prompts; `index`: in the
        group, by default the next; `of`: samples that the group will have, if known. `max_tokens`, `sampling` and
        `adapter` are as in a PromptGroup. `deadline_s`: seconds after which the sample ends, cancelled, with its tokens
        so far. Raises RolloutRejected with the reason, and ValueError for bad arguments.

        Several turns of one sample: the prompt of a later one begins with the earlier prompt and its answer's tokens,
        under the same group and index. `turn`: its number, which enters the key of its tokens. `hold_s`: seconds for
        which the sample's KV is held for its next turn, 0 after the last one.

        `features`: processed images of a prompt given as token ids, in the format of vLLM's `/inference/v1/generate`.
        """
        return await self._calls.generate(self.settings, self._request(token_ids, **request))

    generate_blocking = blocking(generate)

    async def score(self, token_ids: Sequence[int], top: int = 0, **request) -> Scored:
        """Returns logprobs of these tokens, from the second on, under the model's own distribution, by one pass of it.

        `top`: number of likeliest tokens of each position, at most 128. `request`: `group`, `adapter`, `deadline_s`, as
        in `generate`. The context must have room for one more token. Raises as `generate`, and RolloutRejected if the
        pass failed or was cancelled.
        """
        answer = await self.generate(token_ids, index=0, max_tokens=1, sampling={"prompt_logprobs": top}, **request)
        sample = answer.sample
        if not sample.segments:
            raise RolloutRejected(f"score of {len(token_ids)} tokens: {sample.error or sample.finish_reason}")
        return Scored(sample.prompt_logprobs, sample.segments[0].weights_version, sample.segments[0].weights_digest)

    score_blocking = blocking(score)

    async def stream(self, token_ids: Sequence[int] | None = None, **request) -> AsyncIterator[SampleTokens]:
        """Generates one sample. Yields its tokens as its chunks end; the last item has its `answer`.

        Takes the arguments of `generate`, and `chunk_tokens`: maximum tokens of an item, unless the sample runs
        already. Tokens that were yielded never change. The stream continues after a lost coordinator. It raises
        StreamBroken if other tokens would follow: the weights have changed meanwhile, or the sample was made again at
        exactness `law` and has parted. Closing the iterator ends the sample.
        """
        asked = self._request(token_ids, **{"chunk_tokens": STREAM_CHUNK_TOKENS} | request)
        async with aclosing(self._calls.stream(self.settings, asked)) as parts:
            async for part in parts:
                yield part

    stream_blocking = blocking_iterator(stream)

    def submit(self, token_ids: Sequence[int] | None = None, **request) -> None:
        """Starts one sample, whose answer `samples` yields. Takes the arguments of `generate`; needs a running loop."""
        call = self._calls.generate(self.settings, self._request(token_ids, **request))
        task = asyncio.ensure_future(call)
        self._unread += 1
        self._tasks[task] = None
        task.add_done_callback(self._note)

    def _note(self, task: asyncio.Task) -> None:
        self._tasks.pop(task, None)
        self._ended.put_nowait(task)
        task.cancelled() or task.exception()  # whether `samples` is read or not

    async def samples(self) -> AsyncIterator[SampleAnswer]:
        """Yields the answers of submitted samples as they end, until there is none left. Raises the error of a sample
        that has no answer, and ValueError for one that `close` has ended; another call yields the others.
        """
        while self._unread:
            self._unread -= 1  # another reader may wait for the last one, too
            try:
                task = await self._ended.get()
            except asyncio.CancelledError:
                self._unread += 1
                raise
            if task.cancelled():
                raise ValueError(f"session {self.settings.batch_id!r} was closed before a sample had ended")
            yield task.result()

    async def cancel(self, group: str | None = None, index: int | None = None) -> int:
        """Ends one sample, a group or all: each is answered with its tokens so far. Returns the number in flight."""
        return await self._calls.cancel(self.settings.batch_id, group, index)

    cancel_blocking = blocking(cancel)

    async def close(self) -> None:
        """Ends the session, and its samples in flight."""
        self._is_closed = True
        self._heartbeat.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._calls.close(self.settings.batch_id)

    close_blocking = blocking(close)

    async def __aenter__(self) -> "RolloutSession":
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()

    def _request(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        text: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        features: Features | Mapping | None = None,
        group: str | None = None,
        index: int | None = None,
        of: int | None = None,
        max_tokens: int = 256,
        sampling: SamplingParams | Mapping | None = None,
        adapter: str | None = None,
        deadline_s: float | None = None,
        turn: int = 0,
        hold_s: float = 0.0,
        chunk_tokens: int | None = None,
    ) -> SampleRequest:
        if self._is_closed:
            raise ValueError(f"session {self.settings.batch_id!r} is closed; open another")
        if features is not None:
            features = Features.model_validate(features)
        prompt = {"token_ids": token_ids, "text": text, "messages": messages, "features": features}
        prompt = {name: value for name, value in prompt.items() if value is not None}
        name = prompt_name(prompt) if group is None else group
        asked = PromptGroup(
            prompt_id=name,
            samples=1,
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            adapter=adapter,
            **prompt,
        )
        with self._numbering:
            request = SampleRequest(
                group=asked,
                index=self._counts[name] if index is None else index,
                of=of,
                deadline_s=deadline_s,
                chunk_tokens=chunk_tokens,
                turn=turn,
                hold_s=hold_s,
            )
            self._counts[name] += 1
        return request


def new_session(
    calls: SampleCalls, batch_id: str | None, settings: Mapping, heartbeat: Callable[[Callable], object]
) -> RolloutSession:
    """Returns a session under `batch_id`, or under a new name. `settings`: those of a RolloutBatch without groups.
    Raises ValueError for others.
    """
    name = f"session-{uuid4().hex[:12]}" if batch_id is None else batch_id
    return RolloutSession(calls, BatchSettings(batch_id=name, **settings), heartbeat)


def prompt_name(prompt: Mapping[str, Sequence | Features]) -> str:
    """Returns the name of the group of equal prompts: a digest of their token ids, text or messages, and of their
    features. Raises ValueError for features that are not base64.
    """
    parts = {name: value for name, value in prompt.items() if name != "features"}
    content = {name: value if isinstance(value, str) else list(value) for name, value in parts.items()}
    if "features" in prompt and not prompt["features"].is_empty:
        content["features"] = PromptFeatures.of(prompt["features"]).name
    return f"prompt-{blake2b(json.dumps(content, default=int).encode(), digest_size=8).hexdigest()}"


def groups_of_answers(answers: list[SampleAnswer]) -> dict[str, GroupResult]:
    """Returns the answers of a session as whole groups, by name."""
    found: dict[str, GroupResult] = {}
    for name in {answer.group: None for answer in answers}:
        mates = sorted((one for one in answers if one.group == name), key=lambda one: one.sample.sample_index)
        found[name] = GroupResult(
            batch_id=mates[0].batch_id,
            prompt_id=name,
            prompt_token_ids=mates[0].prompt_token_ids,
            samples=tuple(one.sample for one in mates),
            prompt_key=mates[0].prompt_key,
            step=mates[0].step,
        )
    return found
