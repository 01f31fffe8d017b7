"""Streamed answers as events, in vLLM's formats: pieces of each choice in any order, then the usage.

A choice's last event has its finish_reason, and the additional fields of whole answers (see `answers`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from tailrace.app.gateway import answers
from tailrace.app.gateway.answer_text import stream_text, text_for
from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.chat.deltas import ParsedDeltas, TextDeltas
from tailrace.app.gateway.edge.errors import SampleFailed
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import CompletionRequest, Streamable, TokensRequest
from tailrace.app.gateway.service import ServedModel, Wanted
from tailrace.app.gateway.stream_text import StreamText
from tailrace.deployments.messages.session import COLUMNS, SampleTokens
from tailrace.policies.protocol.actions import SampleEnd


class AnswerStream:
    """The events of one request. `prefix`, `kind`: prefix of its id, and kind of its object."""

    prefix = kind = ""

    def __init__(self, request: Streamable, model: ServedModel, naming: Naming, wanted: Wanted):
        self.request, self.model, self.naming, self.wanted = request, model, naming, wanted
        self._same = answers.head(self.prefix, self.kind, model)
        self._prompts: dict[int, Sequence[int]] = {}  # token ids by choice
        self._made: Counter[int] = Counter()  # tokens by choice
        self._waiting: dict[int, SampleTokens] = {}  # the last token of each choice

    def events(self, number: int, part: SampleTokens) -> Iterator[dict]:
        """Yields the events of one part of a choice. Raises SampleFailed."""
        if part.answer is not None and part.answer.sample.finish_reason is SampleEnd.FAILED:
            raise SampleFailed(part.answer.sample.error)
        if part.prompt_token_ids is not None:
            self._prompts[number] = part.prompt_token_ids
            choices = self._begin(number)
        else:
            due = self._due(number, part)
            self._made[number] += len(due.token_ids)
            choices = self._choices(number, part, due)
        for choice in choices:
            yield self._event({"index": number} | choice)

    def _due(self, number: int, part: SampleTokens) -> SampleTokens:
        """Returns the tokens of the next event: those whose text is known, so all but the last until the answer
        ends.
        """
        known = self._waiting.get(number, part)
        if known is not part:
            columns = {name: (*getattr(known, name), *getattr(part, name)) for name in COLUMNS}
            known = known.model_copy(update=columns)
        if part.answer is not None:
            return known
        count = max(0, len(known.token_ids) - 1)
        self._waiting[number] = known.beyond(known.start + count)
        return known.model_copy(update={name: getattr(known, name)[:count] for name in COLUMNS})

    def last(self) -> Iterator[dict]:
        if self.request.wants_usage(always=False):
            yield self._same | {"choices": [], "usage": self._usage()}

    def _event(self, choice: dict) -> dict:
        usage = {"usage": self._usage()} if self.request.wants_usage(always=True) else {}
        return self._same | {"choices": [choice]} | usage

    def _usage(self) -> dict:
        lengths = {number // self.wanted.n: len(ids) for number, ids in self._prompts.items()}  # by prompt
        return answers.usage(sum(lengths.values()), self._made.total(), self._thoughts())

    def _thoughts(self) -> int | None:
        """Returns the tokens of thoughts so far; None if nothing finds them."""
        return None

    def _begin(self, number: int) -> Iterator[dict]:
        raise NotImplementedError

    def _choices(self, number: int, part: SampleTokens, due: SampleTokens) -> Iterator[dict]:
        raise NotImplementedError


class CompletionStream(AnswerStream):
    """Events of `/v1/completions`."""

    prefix, kind = "cmpl", "text_completion"
    request: CompletionRequest

    def __init__(self, *request):
        super().__init__(*request)
        self._texts: dict[int, StreamText] = {}
        self._offsets: Counter[int] = Counter()

    def _begin(self, number: int) -> Iterator[dict]:
        self._texts[number] = stream_text(
            self.model.prompts, self.wanted.sampling, not self.request.skip_special_tokens
        )
        if self.request.return_token_ids:
            prompt = list(self._prompts[number])
            yield {"text": "", "logprobs": None, "finish_reason": None, "prompt_token_ids": prompt, "token_ids": []}

    def _choices(self, number: int, part: SampleTokens, due: SampleTokens) -> Iterator[dict]:
        text, request = self._texts[number], self.request
        choice = {"text": "", "logprobs": None, "finish_reason": None}
        if request.logprobs is not None and due.token_ids:
            choice["logprobs"], self._offsets[number] = answers.completion_logprobs(
                due, self.model, bool(request.return_tokens_as_token_ids), self._offsets[number]
            )
        if request.return_token_ids:
            choice["token_ids"] = list(due.token_ids)
        if part.answer is None:
            choice["text"] = text.more(part.token_ids)
            if choice["text"] or choice["logprobs"] or choice.get("token_ids"):
                yield choice
            return
        whole = text_for(request, part.answer.sample, self.model.prompts)
        yield choice | {"text": text.end(whole)} | answers.end(self.naming, part.answer)


class PromptedStream(AnswerStream):
    """A stream of one prompt, whose token ids are a field of the first event, not of a choice."""

    def _event(self, choice: dict) -> dict:
        prompt = choice.pop("prompt_token_ids", None)
        return super()._event(choice) | ({} if prompt is None else {"prompt_token_ids": prompt})


class ChatStream(PromptedStream):
    """Events of `/v1/chat/completions`."""

    prefix, kind = "chatcmpl", "chat.completion.chunk"

    def __init__(self, chat: Chat, *request):
        super().__init__(*request)
        self._chat = chat
        self._deltas: dict[int, TextDeltas | ParsedDeltas] = {}

    def _thoughts(self) -> int | None:
        return sum(one.thoughts for one in self._deltas.values()) if self._chat.finds_thoughts else None

    def _begin(self, number: int) -> Iterator[dict]:
        prompts, sampling, parser = self.model.prompts, self.wanted.sampling, self._chat.parser
        if parser is None:
            self._deltas[number] = TextDeltas(prompts, sampling, self.request)
        else:
            name = self.naming.sample(self.wanted.prompts[0], number)
            self._deltas[number] = ParsedDeltas(prompts, sampling, parser, self._prompts[number], name)
        prompt = {"prompt_token_ids": list(self._prompts[number])} if self.request.return_token_ids else {}
        yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None} | prompt

    def _choices(self, number: int, part: SampleTokens, due: SampleTokens) -> Iterator[dict]:
        deltas, last, thoughts = self._deltas[number], {}, self.request.include_reasoning is not False
        if self.request.logprobs and due.token_ids:
            content = answers.chat_logprobs(due, self.model, bool(self.request.return_tokens_as_token_ids))
            last["logprobs"] = {"content": content}
        if self.request.return_token_ids and due.token_ids:
            last["token_ids"] = list(due.token_ids)
        if part.answer is None:
            found = list(joined(shown(deltas.more(part.token_ids), thoughts)))
        else:
            found = list(joined(shown(deltas.end(part.answer.sample), thoughts)))
            last |= answers.end(self.naming, part.answer)
            if deltas.calls_tools:
                last["finish_reason"] = answers.with_calls(last["finish_reason"], self._chat)
            self._chat.keep(deltas.message, self._prompts[number], part.answer.sample)
        if last and not found:
            found = [{}]
        for place, delta in enumerate(found):
            same = {"delta": delta, "logprobs": None, "finish_reason": None}
            yield same | (last if place == len(found) - 1 else {})


class TokensStream(PromptedStream):
    """Events of `/inference/v1/generate`. As in vLLM, the event with the finish_reason has tokens, too."""

    prefix, kind = "gen", "generate"
    request: TokensRequest

    def __init__(self, request: TokensRequest, *more):
        super().__init__(request, *more)
        self._same |= {"request_id": request.request_id or self._same["id"], "output_mode": "tokens"}

    def _begin(self, number: int) -> Iterator[dict]:
        if self.request.return_token_ids:
            prompt = {"prompt_token_ids": list(self._prompts[number])} | answers.placeholders(self.request)
            yield {"token_ids": [], "logprobs": None, "finish_reason": None} | prompt

    def _choices(self, number: int, part: SampleTokens, due: SampleTokens) -> Iterator[dict]:
        if part.answer is None and not due.token_ids:
            return
        choice = {"token_ids": list(due.token_ids), "logprobs": None, "finish_reason": None}
        if self.request.sampling_params.logprobs is not None:
            choice["logprobs"] = {"content": answers.tokens_logprobs(due, self.model)}
        choice["sampling_mask"] = answers.sampling_mask(due)
        yield choice | ({} if part.answer is None else answers.end(self.naming, part.answer))


def joined(deltas: Iterator[dict]) -> Iterator[dict]:
    """Joins consecutive pieces of content, and of thoughts."""
    part, text = "", ""
    for delta in deltas:
        name = next(iter(delta)) if len(delta) == 1 else ""
        if text and name != part:
            yield {part: text}
            text = ""
        if name in ("content", "reasoning"):
            part, text = name, text + delta[name]
        else:
            yield delta
    if text:
        yield {part: text}


def shown(deltas: Iterator[dict], thoughts: bool) -> Iterator[dict]:
    """Yields what a client gets to see, without thoughts if it does not want them."""
    for delta in deltas:
        if found := {name: part for name, part in delta.items() if thoughts or name != "reasoning"}:
            yield found
