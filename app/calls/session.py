"""Open sessions of a client: single samples, asked for at any time.

    async with client.open(seed=7, step=3) as session:
        answer = await session.generate(text="2 + 2 =", group="sum", max_tokens=32)     # one sample, once it has ended
        session.submit(messages=[{"role": "user", "content": "Hello"}])                 # begins one, for `samples`
        async for answer in session.samples(): ...                                      # as they end
        async for part in session.stream(text="2 + 2 ="): ...                           # one sample, as its chunks end

Tokens depend on seed, step, group and index alone: they are those of a `RolloutBatch` with such a prompt_id. A request
without an index is the next one of its group, in the order of the calls.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from hashlib import blake2b
from uuid import uuid4

from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.refused import QuotaExceeded, RolloutRejected, StreamBroken
from tailrace.app.calls.resume import Interrupted, Patience, lost_service
from tailrace.deployments.messages.roles import NotAdmitted
from tailrace.deployments.messages.rollout import (
    BatchSettings,
    GroupResult,
    PromptGroup,
    Rejected,
    RejectedBy,
    SamplingParams,
)
from tailrace.deployments.messages.session import STREAM_CHUNK_TOKENS, SampleAnswer, SampleRequest, SampleTokens


class RolloutSession:
    """See the module docstring. Made by `RolloutClient.open`. It is closed once its process is gone for a minute."""

    def __init__(self, calls: "SessionCalls", settings: BatchSettings, heartbeat: Callable[[Callable], object]):
        self.settings = settings
        self._calls = calls
        self._counts: Counter[str] = Counter()  # requests by group
        self._tasks: set[asyncio.Task] = set()
        self._ended: asyncio.Queue[asyncio.Task] = asyncio.Queue()
        self._unread = 0  # submitted samples that `samples` has not given
        self._heartbeat = heartbeat(lambda: calls.renew_session(settings.batch_id))
        self._is_closed = False

    async def generate(self, token_ids: Sequence[int] | None = None, **request) -> SampleAnswer:
        """Generate one sample. A call that is cancelled ends the sample.

        Give one of `token_ids`, `text`, `messages`. `group`: a name, by default that of equal prompts; `index`: in the
        group, by default the next; `of`: samples that the group will have, if known. `max_tokens` and `sampling` are as
        in a PromptGroup. `deadline_s`: seconds after which the sample ends, cancelled, with its tokens so far. Raises
        RolloutRejected with the reason, and ValueError for bad arguments.
        """
        return await self._calls.generate(self.settings, self._request(token_ids, **request))

    generate_blocking = blocking(generate)

    async def stream(self, token_ids: Sequence[int] | None = None, **request) -> AsyncIterator[SampleTokens]:
        """Generate one sample. Yields its tokens as its chunks end; the last item has its `answer`.

        Takes the arguments of `generate`, and `chunk_tokens`: bound of an item, unless the sample runs already.
        Tokens once given never change. The stream continues after a lost coordinator. It raises StreamBroken if the
        weights have changed meanwhile, so that other tokens would follow.
        An iterator that is closed ends the sample.
        """
        asked = self._request(token_ids, **{"chunk_tokens": STREAM_CHUNK_TOKENS} | request)
        async with aclosing(self._calls.stream(self.settings, asked)) as parts:
            async for part in parts:
                yield part

    stream_blocking = blocking_iterator(stream)

    def submit(self, token_ids: Sequence[int] | None = None, **request) -> None:
        """Begin one sample, whose answer `samples` gives. Takes the arguments of `generate`; needs a running loop."""
        call = self._calls.generate(self.settings, self._request(token_ids, **request))
        task = asyncio.ensure_future(call)
        self._unread += 1
        self._tasks.add(task)
        task.add_done_callback(self._note)

    def _note(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._ended.put_nowait(task)
        task.cancelled() or task.exception()  # whether `samples` is read or not

    async def samples(self) -> AsyncIterator[SampleAnswer]:
        """Yields the answers of submitted samples as they end, until there is none left. Raises the error of a sample
        that has none; another call gives the others."""
        while self._unread:
            task = await self._ended.get()
            self._unread -= 1
            yield task.result()

    async def cancel(self, group: str | None = None, index: int | None = None) -> int:
        """End one sample, a group or all: each is answered with its tokens so far. Returns the number in flight."""
        return await self._calls.cancel_samples(self.settings.batch_id, group, index)

    cancel_blocking = blocking(cancel)

    async def close(self) -> None:
        """End the session, and its samples in flight."""
        self._is_closed = True
        self._heartbeat.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._calls.close_session(self.settings.batch_id)

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
        group: str | None = None,
        index: int | None = None,
        of: int | None = None,
        max_tokens: int = 256,
        sampling: SamplingParams | Mapping | None = None,
        deadline_s: float | None = None,
        chunk_tokens: int | None = None,
    ) -> SampleRequest:
        if self._is_closed:
            raise ValueError(f"session {self.settings.batch_id!r} is closed; open another")
        prompt = {"token_ids": token_ids, "text": text, "messages": messages}
        prompt = {name: value for name, value in prompt.items() if value is not None}
        name = prompt_name(prompt) if group is None else group
        asked = PromptGroup(
            prompt_id=name, samples=1, max_tokens=max_tokens, sampling=sampling or SamplingParams(), **prompt
        )
        index = self._counts[name] if index is None else index
        request = SampleRequest(group=asked, index=index, of=of, deadline_s=deadline_s, chunk_tokens=chunk_tokens)
        self._counts[name] += 1
        return request


def prompt_name(prompt: Mapping[str, Sequence]) -> str:
    """The name of the group of equal prompts: a digest of their token ids, text or messages."""
    content = {name: value if isinstance(value, str) else list(value) for name, value in prompt.items()}
    return f"prompt-{blake2b(json.dumps(content, default=int).encode(), digest_size=8).hexdigest()}"


def groups_of_answers(answers: list[SampleAnswer]) -> dict[str, GroupResult]:
    """The answers of a session as whole groups, by name."""
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


class SessionCalls:
    """`_handle`, `_role`, `_resume_s`, `_heartbeat`, `_weights`, `_ask` and `update_weights` are the client's."""

    def open(self, batch_id: str | None = None, **settings) -> RolloutSession:
        """Open a session: single samples, asked for at any time; see `tailrace.app.calls.session`.

        `batch_id`: by default a new name. `settings`: those of a RolloutBatch without groups, such as `seed`, `step`,
        `priority`, `share`. Raises ValueError for others.
        """
        name = f"session-{uuid4().hex[:12]}" if batch_id is None else batch_id
        return RolloutSession(self, BatchSettings(batch_id=name, **settings), self._heartbeat)

    async def generate(self, settings: BatchSettings, request: SampleRequest) -> SampleAnswer:
        """One sample of a session; `RolloutSession.generate` makes the request. Outlives the coordinator."""
        patience, resumed = Patience(self._resume_s), False
        while True:
            try:
                return await self._generate_once(settings, request, resumed)
            except Interrupted as lost:
                resumed = True
                await patience.wait(lost)

    generate_blocking = blocking(generate)

    async def _generate_once(self, settings: BatchSettings, request: SampleRequest, resumed: bool) -> SampleAnswer:
        sent = self._sent(settings)
        call = self._handle.generate.remote(self._role, sent, request)
        try:
            answer = await call
        except lost_service() as error:
            raise Interrupted(error) from error
        except asyncio.CancelledError:
            call.cancel()  # else the sample would run to its end without a reader
            raise
        return await self._taken(answer, sent, resumed)

    async def stream(self, settings: BatchSettings, request: SampleRequest) -> AsyncIterator[SampleTokens]:
        """One sample of a session as its chunks end; `RolloutSession.stream` makes the request."""
        patience, given, is_begun, is_whole = Patience(self._resume_s), [], False, False
        while not is_whole:
            try:
                async with aclosing(self._stream_once(settings, request, is_begun)) as items:
                    async for item in items:
                        part = _beyond(given, item)
                        if part.token_ids or part.answer or not is_begun:
                            is_begun = True
                            given += part.token_ids
                            patience.renew()
                            yield part
                        is_whole = part.answer is not None  # the call itself ends after it, without a cancel
                if not is_whole:
                    raise Interrupted(StreamBroken("the stream ended before the sample"))
            except Interrupted as lost:
                await patience.wait(lost)

    stream_blocking = blocking_iterator(stream)

    async def _stream_once(
        self, settings: BatchSettings, request: SampleRequest, resumed: bool
    ) -> AsyncIterator[SampleTokens]:
        sent = self._sent(settings)
        stream = self._stream.stream_sample.remote(self._role, sent, request)
        try:
            async for item in stream:
                yield await self._taken(item, sent, resumed)
        except lost_service() as error:
            raise Interrupted(error) from error
        finally:
            stream.cancel()  # else the sample would run to its end without a reader

    def _sent(self, settings: BatchSettings) -> BatchSettings:
        """The settings as the coordinator gets them: it must not hold older weights than this client's last update."""
        version = self._weights[0] if self._weights else 0
        return settings.model_copy(update={"min_weights_version": max(settings.min_weights_version, version)})

    async def _taken(self, answer, sent: BatchSettings, resumed: bool):
        """The answer itself; raises for a refusal, Interrupted if the call may be made again."""
        if isinstance(answer, NotAdmitted):
            raise PermissionError(answer.reason)
        if not isinstance(answer, Rejected):
            return answer
        version = self._weights[0] if self._weights else 0
        if answer.by is RejectedBy.WEIGHTS and self._weights and sent.weights_version in (None, version):
            await self.update_weights(*self._weights)  # the service was restarted
            raise Interrupted(RolloutRejected(answer.reason))
        if answer.by is RejectedBy.QUOTA:
            raise Interrupted(QuotaExceeded(answer.reason)) if resumed else QuotaExceeded(answer.reason)
        raise RolloutRejected(answer.reason)

    async def cancel_samples(self, session: str, group: str | None, index: int | None) -> int:
        """End samples of a session, see `RolloutSession.cancel`."""
        return await self._ask("cancel_samples", session, group, index)

    cancel_samples_blocking = blocking(cancel_samples)

    def renew_session(self, session: str) -> object:
        """A sign of life. Does not wait for an answer."""
        return self._handle.renew_session.remote(self._role, session)

    async def close_session(self, session: str) -> bool:
        """End a session, see `RolloutSession.close`. Returns False if it has ended."""
        return await self._ask("close_session", session)

    close_session_blocking = blocking(close_session)


def _beyond(given: list[int], item: SampleTokens) -> SampleTokens:
    """The part of an item that has not been given. Raises StreamBroken if it has other tokens at positions before."""
    known = min(len(given) - item.start, len(item.token_ids))
    whole = item.answer.sample.token_ids[: len(given)] if item.answer else given
    if known < 0 or tuple(given[item.start : item.start + known]) != item.token_ids[:known] or [*whole] != given:
        raise StreamBroken(
            "the coordinator was lost, and the sample has other tokens now: the weights have changed, or it has ended "
            "early; ask for it again"
        )
    return item.beyond(len(given))
