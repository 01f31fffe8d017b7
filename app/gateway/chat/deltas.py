"""The message of one streamed chat answer, piece by piece, and whole as the client assembles it.

Called by `stream_answers`, one object for each choice.
"""

from collections.abc import Iterator, Sequence

from tailrace.app.gateway.answer_text import stream_text, text_for, text_of
from tailrace.app.gateway.chat.answer_parser import RequestParser
from tailrace.app.gateway.requests import Answered
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.messages.rollout import SampleResult, SamplingParams


class TextDeltas:
    """An answer that is text alone."""

    def __init__(self, prompts: Prompts, sampling: SamplingParams, request: Answered):
        self._text = stream_text(prompts, sampling, not request.skip_special_tokens)
        self._prompts, self._request = prompts, request
        self.message: dict = {"role": "assistant", "content": ""}
        self.calls_tools, self.thoughts = False, 0

    def more(self, token_ids: Sequence[int]) -> Iterator[dict]:
        yield from self._content(self._text.more(token_ids))

    def end(self, sample: SampleResult) -> Iterator[dict]:
        yield from self._content(self._text.end(text_for(self._request, sample, self._prompts)))

    def _content(self, text: str) -> Iterator[dict]:
        if text:
            self.message["content"] += text
            yield {"content": text}


class ParsedDeltas:
    """An answer that may have thoughts or call tools, sent token by token through vLLM's parser, since some parsers
    accept no more at once. `message`: has its thoughts, whether they are sent or not. `thoughts`: their tokens so far.

    A token is parsed with its text, once the next one has arrived.
    """

    def __init__(self, prompts: Prompts, sampling: SamplingParams, parser: RequestParser, prompt: Sequence[int],
                 name: str):  # fmt: skip
        self._prompts, self._request, self._prompt, self._name = prompts, parser, prompt, name
        self._text = stream_text(prompts, sampling, parser.special)
        self._parser = parser.parser()
        self._last: list[int] = []
        self._seen: list[int] = []  # tokens that the parser has got
        self.message: dict = {"role": "assistant", "content": "", "tool_calls": []}

    @property
    def calls_tools(self) -> bool:
        return bool(self.message["tool_calls"])

    @property
    def thoughts(self) -> int:
        return self._parser.count_reasoning_tokens(self._seen)

    def more(self, token_ids: Sequence[int]) -> Iterator[dict]:
        for token in token_ids:
            yield from self._parsed(self._text.more([token]), self._last)
            self._last = [token]

    def end(self, sample: SampleResult) -> Iterator[dict]:
        whole = text_of(sample, self._prompts, self._request.special, self._request.with_stop)
        rest = self._text.end(whole)
        yield from self._parsed(rest, self._last, ended=True)

    def _parsed(self, text: str, token_ids: Sequence[int], ended: bool = False) -> Iterator[dict]:
        if not (text or token_ids or ended):
            return
        self._seen += token_ids
        delta = self._request.delta(self._parser, text, token_ids, self._prompt, self._name, ended)
        for part in ("content", "reasoning"):
            if part in delta:
                self.message[part] = self.message.get(part, "") + delta[part]
        for call in delta.get("tool_calls", ()):
            self._add(call)
        if delta:
            yield delta

    def _add(self, call: dict) -> None:
        """Appends a piece of a call to the others, as clients do."""
        calls, function = self.message["tool_calls"], call.get("function", {})
        if call["index"] == len(calls):
            calls.append({"id": call.get("id"), "type": "function", "function": {"name": "", "arguments": ""}})
        for part in ("name", "arguments"):
            calls[call["index"]]["function"][part] += function.get(part) or ""
