"""Thoughts and calls of tools in answers, found by vLLM's own parsers: in whole answers, and in those that arrive
token by token.

vLLM is loaded only if the gateway's configuration names a parser. Source: vLLM 0.32, `vllm.parser`, which its server
uses for the same purpose.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from tailrace.app.gateway.chat.requests import ChatRequest

RANDOM_ID = "chatcmpl-tool-"
"""Prefix of vLLM's own ids of calls, unless the model gives them."""


class AnswerParser:
    """vLLM's parsers of these names, as in its `--tool-call-parser` and `--reasoning-parser`; None for none. Raises
    ValueError, one line, if there is none or it does not fit the tokenizer.
    """

    def __init__(self, tool: str | None, reasoning: str | None, tokenizer: Any):
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        _check("tool_parser", tool, ToolParserManager)
        _check("reasoning_parser", reasoning, ReasoningParserManager)
        self.finds_calls, self.finds_thoughts, self._tokenizer = tool is not None, reasoning is not None, tokenizer
        pairs = {(tool, reasoning), (tool, None), (None, reasoning)} - {(None, None)}
        self._kinds = {(a is not None, b is not None): _kind(a, b, tokenizer) for a, b in pairs}

    def of(self, request: ChatRequest) -> "RequestParser | None":
        """Returns the parser of a request's answers, or None if they are text alone. A form holds from the first token
        on, so an answer that has one has no thoughts.
        """
        is_free = request.tool_choice in (None, "none", "auto") and request.sampling().structured_outputs is None
        kind = self._kinds.get((request.may_call, self.finds_thoughts and is_free))
        return None if kind is None else RequestParser(kind, self._tokenizer, request)


def _check(field: str, name: str | None, manager: Any) -> None:
    if name is not None and name not in (known := manager.list_registered()):
        raise ValueError(f"{field}: {name!r} is none of vLLM's: {', '.join(known)}")


def _kind(tool: str | None, reasoning: str | None, tokenizer: Any) -> type:
    from vllm.parser.parser_manager import ParserManager

    try:
        return ParserManager.get_parser(tool, reasoning, enable_auto_tools=True, tokenizer=tokenizer)
    except (TypeError, RuntimeError) as error:
        field, name = ("tool_parser", tool) if reasoning is None else ("reasoning_parser", reasoning)
        raise ValueError(f"{field}: {name!r} is not for this model: {str(error).splitlines()[0]}") from error


class RequestParser:
    """Finds thoughts and calls in the answers of one request.

    `form`: form of the answers, for StructuredOutputs, or None. `special`: True if their text has to show special
    tokens; `with_stop`: the same for the stop. `is_named`: True if one tool was chosen.
    """

    def __init__(self, kind: type, tokenizer: Any, request: ChatRequest):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        body: dict = {"messages": [{"role": one.role, "content": one.text()} for one in request.messages]}
        body["skip_special_tokens"] = request.skip_special_tokens
        if request.may_call:
            body |= {"tools": [tool.for_template() for tool in request.tools], "tool_choice": "auto"}
            body |= request.model_dump(include={"tool_choice", "parallel_tool_calls"}, exclude_none=True)
        self._kind, self._tokenizer = kind, tokenizer
        self._template = {name: one for name, one in request.template().items() if name not in ("tools", "documents")}
        try:
            self._asked = ChatCompletionRequest.model_validate(body)
            self._asked = self.parser().adjust_request(self._asked)
        except Exception as error:  # vLLM's own kinds, which are no ValueError
            field = "tools" if request.may_call else "messages"
            raise ValueError(f"{field}: vLLM's parser refuses them: {error}") from error
        self.special = not self._asked.skip_special_tokens
        self.with_stop = request.include_stop_str_in_output
        self.is_named = request.chosen is not None
        given = self._asked.structured_outputs
        self.form = None
        if given is not None:
            self.form = {"structural_tag": given.structural_tag} if given.json is None else {"json": given.json}

    def parser(self) -> Any:
        """Returns a parser for one answer: it has a state."""
        return self._kind(
            self._tokenizer, self._asked.tools, chat_template_kwargs=self._template or None, model_config=None
        )

    def message(self, text: str, token_ids: Sequence[int], name: str) -> tuple[dict, int]:
        """Returns the message of a whole answer, and the tokens of its thoughts. `name`: name of its sample, from which
        the calls get their ids.
        """
        parser = self.parser()
        thoughts, content, calls = parser.parse(
            text, self._asked, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        found = [
            {
                "id": own_id(call.id, name, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls or [])
            if self._is_wanted(number)
        ]
        message = {"role": "assistant", "content": content} | ({"reasoning": thoughts} if thoughts else {})
        message |= {"tool_calls": found} if found else {}
        return message, parser.count_reasoning_tokens(list(token_ids))

    def delta(
        self, parser: Any, text: str, token_ids: Sequence[int], prompt: Sequence[int], name: str, ended: bool
    ) -> dict:
        """Returns the piece of a message that more tokens and their text add; it may be empty."""
        found = parser.parse_delta(text, list(token_ids), self._asked, list(prompt), finished=ended)
        if found is None:
            return {}
        calls = [one.model_dump(exclude_none=True) for one in found.tool_calls if self._is_wanted(one.index)]
        for call in calls:
            if "id" in call:
                call["id"] = own_id(call["id"], name, call["index"])
        parts = {"reasoning": found.reasoning, "content": found.content, "tool_calls": calls}
        return {name: part for name, part in parts.items() if part}

    def _is_wanted(self, number: int) -> bool:
        return number == 0 or self._asked.parallel_tool_calls is not False


def own_id(given: str | None, name: str, number: int) -> str:
    """Returns the id of a sample's call, unless the model gives one. The same sample always has the same ids: some
    templates put them into prompts.
    """
    if given and not given.startswith(RANDOM_ID):
        return given
    return f"call-{blake2b(f'{name}/{number}'.encode(), digest_size=12).hexdigest()}"
