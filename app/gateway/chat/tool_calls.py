"""Calls of tools in answers, found by vLLM's own parsers: in whole answers, and in answers that arrive token by token.

vLLM is loaded only if the gateway's configuration names a parser. Source: vLLM 0.32, `vllm.parser`, which its server
uses for the same purpose.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from tailrace.app.gateway.chat.requests import ChatRequest

RANDOM_ID = "chatcmpl-tool-"
"""Prefix of vLLM's own ids of calls, unless the model gives them."""


class ToolParser:
    """vLLM's parser `name`, as in its `--tool-call-parser`. Raises ValueError, one line, if there is none or it does
    not fit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any):
        from vllm.parser.parser_manager import ParserManager
        from vllm.tool_parsers import ToolParserManager

        if name not in (known := ToolParserManager.list_registered()):
            raise ValueError(f"tool_parser: {name!r} is none of vLLM's: {', '.join(known)}")
        try:
            self._kind = ParserManager.get_parser(name, enable_auto_tools=True, tokenizer=tokenizer)
        except TypeError as error:
            raise ValueError(f"tool_parser: {name!r} is not for this model: {str(error).splitlines()[0]}") from error
        self._tokenizer = tokenizer

    def of(self, request: ChatRequest) -> "RequestedCalls":
        return RequestedCalls(self._kind, self._tokenizer, request)


class RequestedCalls:
    """How the answers of one request may call tools.

    `form`: form of the answers, for StructuredOutputs, or None. `special`: True if their text has to show special
    tokens; `with_stop`: the same for the stop. `is_named`: True if one tool was chosen.
    """

    def __init__(self, kind: type, tokenizer: Any, request: ChatRequest):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        body = {"messages": [{"role": one.role, "content": one.text()} for one in request.messages]}
        body["tools"] = [tool.for_template() for tool in request.tools]
        body |= request.model_dump(include={"tool_choice", "parallel_tool_calls"}, exclude_none=True)
        self._kind, self._tokenizer = kind, tokenizer
        try:
            self._asked = ChatCompletionRequest.model_validate({"tool_choice": "auto"} | body)
            self._asked = self.parser().adjust_request(self._asked)
        except Exception as error:  # vLLM's own kinds, which are no ValueError
            raise ValueError(f"tools: vLLM's parser refuses them: {error}") from error
        self.special = not self._asked.skip_special_tokens
        self.with_stop = request.include_stop_str_in_output
        self.is_named = request.chosen is not None
        given = self._asked.structured_outputs
        self.form = None
        if given is not None:
            self.form = {"structural_tag": given.structural_tag} if given.json is None else {"json": given.json}

    def parser(self) -> Any:
        """Returns a parser for one answer: it has a state."""
        return self._kind(self._tokenizer, self._asked.tools, chat_template_kwargs=None, model_config=None)

    def message(self, text: str, token_ids: Sequence[int], name: str) -> dict:
        """Returns the message of a whole answer. `name`: name of its sample, from which the calls get their ids."""
        _, content, calls = self.parser().parse(
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
        return {"role": "assistant", "content": content} | ({"tool_calls": found} if found else {})

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
        return ({"content": found.content} if found.content else {}) | ({"tool_calls": calls} if calls else {})

    def _is_wanted(self, number: int) -> bool:
        return number == 0 or self._asked.parallel_tool_calls is not False


def own_id(given: str | None, name: str, number: int) -> str:
    """Returns the id of a sample's call, unless the model gives one. The same sample always has the same ids: some
    templates put them into prompts.
    """
    if given and not given.startswith(RANDOM_ID):
        return given
    return f"call-{blake2b(f'{name}/{number}'.encode(), digest_size=12).hexdigest()}"
