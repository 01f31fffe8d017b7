"""Chats: prompts by the model's own template, turns without encoding answers again, and calls of tools as vLLM's parser
finds them. No engine runs here."""

import json

import pytest

from tailrace.app.gateway.chat.answer_parser import AnswerParser, own_id
from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.chat.conversations import Conversations
from tailrace.app.gateway.chat.deltas import ParsedDeltas
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.constraints.form_check import form_refusal
from tailrace.deployments.messages.rollout import SampleResult, SamplingParams
from tailrace.policies.protocol.actions import SampleEnd

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
USER = {"role": "user", "content": "What is there?"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": %d}}\n</tool_call>'
CALLS = f"I look.\n{CALL % 1}\n{CALL % 20}"


@pytest.fixture(scope="module")
def prompts(model_dir) -> Prompts:
    return Prompts(str(model_dir), 2_048)


@pytest.fixture(scope="module")
def parser(prompts) -> AnswerParser:
    return AnswerParser("hermes", None, prompts.tokenizer)


@pytest.fixture
def chat(prompts):
    """Makes the chat of a request; all of a test share one memory of conversations."""
    conversations = Conversations(10_000)

    def make(tool_parser=None, **request) -> Chat:
        return Chat(ChatRequest(**request), prompts, conversations, tool_parser)

    return make


THOUGHTS = "<think>\nA lamp?\n</think>\n\n"


@pytest.fixture(scope="module")
def thinking(thinking_tokenizer) -> tuple[Prompts, AnswerParser]:
    """Prompts and parser of a model that thinks."""
    prompts = Prompts(str(thinking_tokenizer), 2_048)
    return prompts, AnswerParser("hermes", "qwen3", prompts.tokenizer)


def ended(token_ids, end=SampleEnd.STOP, **fields) -> SampleResult:
    logprobs = (-1.0,) * len(token_ids)
    same = {"sample_index": 0, "text": "", "logprobs": logprobs, "raw_logprobs": logprobs, "finish_reason": end}
    return SampleResult(token_ids=tuple(token_ids), **same | fields)


def test_a_prompt_is_that_of_the_template(chat, prompts):
    expected = prompts.tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert list(chat(messages=[USER]).token_ids) == expected
    begun = [USER, {"role": "assistant", "content": "There is"}]
    more = chat(messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert prompts.decode(list(more.token_ids), special=True).endswith("<|im_start|>assistant\nThere is")


def test_a_later_turn_keeps_the_tokens_of_the_answer(chat, prompts):
    first = chat(messages=[USER])
    odd = [*prompts.encode("The"), *prompts.encode("re"), prompts.tokenizer.eos_token_id]  # not as `There` is encoded
    message = {"role": "assistant", "content": "There"}
    first.keep(message, first.token_ids, ended(odd))
    later = [USER, message | {"refusal": None}, {"role": "user", "content": "Where?"}]
    second = chat(messages=later)
    again = prompts.encode(prompts.chat([one | {"refusal": None} for one in later]))
    assert second.token_ids[: len(first.token_ids) + 3] == (*first.token_ids, *odd) and second.token_ids != tuple(again)
    assert prompts.decode(list(second.token_ids), special=True) == prompts.decode(again, special=True)
    third = [*later, {"role": "assistant", "content": "Here"}, USER]
    second.keep(third[3], second.token_ids, ended(prompts.encode("Here"), SampleEnd.LENGTH))
    whole = chat(messages=third).token_ids
    assert whole[: len(second.token_ids) + 1] == (*second.token_ids, *prompts.encode("Here"))
    assert prompts.decode(list(whole), special=True) == prompts.chat(third), "an answer that was cut is closed"


@pytest.mark.parametrize(
    ("change", "end", "stop_reason"),
    [
        ({"content": "Other"}, SampleEnd.STOP, None),
        ({"content": "There"}, SampleEnd.STOP, "!"),
        ({"content": "There"}, SampleEnd.CANCELLED, None),
    ],
)
def test_another_answer_or_one_that_a_stop_text_ended_is_encoded(chat, prompts, change, end, stop_reason):
    first = chat(messages=[USER])
    tokens = [*prompts.encode("The"), *prompts.encode("re"), prompts.tokenizer.eos_token_id]
    first.keep({"role": "assistant", "content": "There"}, first.token_ids, ended(tokens, end, stop_reason=stop_reason))
    later = [USER, {"role": "assistant"} | change, USER]
    assert list(chat(messages=later).token_ids) == prompts.encode(prompts.chat(later))


def test_other_tools_or_template_arguments_are_another_conversation(chat, prompts):
    first = chat(messages=[USER])
    odd = [*prompts.encode("The"), *prompts.encode("re"), prompts.tokenizer.eos_token_id]
    message = {"role": "assistant", "content": "There"}
    first.keep(message, first.token_ids, ended(odd))
    changed = chat(messages=[USER, message, USER], chat_template_kwargs={"enable_thinking": False})
    assert list(changed.token_ids) == prompts.encode(prompts.chat([USER, message, USER]))


def test_conversations_have_a_bound(prompts):
    conversations = Conversations(200)
    chats = [Chat(ChatRequest(messages=[USER | {"content": "x " * n}]), prompts, conversations, None) for n in (80, 90)]
    message = {"role": "assistant", "content": "a"}
    for one in chats:
        one.keep(message, one.token_ids, ended([5, prompts.tokenizer.eos_token_id]))
    assert len(conversations._turns) == 1 and 0 < conversations._turns.currsize <= 200
    Conversations(0).keep(b"", next(iter(conversations._turns.values())))


def test_calls_are_found_in_whole_answers_and_in_pieces(chat, parser, prompts):
    asked = chat(parser, messages=[USER], tools=TOOLS)
    tokens = [*prompts.encode(CALLS), prompts.tokenizer.eos_token_id]
    whole, _ = asked.parser.message(CALLS, tokens, "sample")
    assert whole["content"] == "I look.\n"
    assert [json.loads(call["function"]["arguments"]) for call in whole["tool_calls"]] == [{"a": 1}, {"a": 20}]
    assert [call["id"] for call in whole["tool_calls"]] == [own_id(None, "sample", n) for n in (0, 1)]
    for size in (1, 3, 100):
        deltas = ParsedDeltas(prompts, SamplingParams(), asked.parser, asked.token_ids, "sample")
        for start in range(0, len(tokens), size):
            list(deltas.more(tokens[start : start + size]))
        list(deltas.end(ended(tokens)))
        assert deltas.message == whole and deltas.calls_tools


def test_an_answer_without_calls_is_content(chat, parser, prompts):
    asked = chat(parser, messages=[USER], tools=TOOLS)
    tokens = [*prompts.encode("Nothing <tool"), prompts.tokenizer.eos_token_id]
    deltas = ParsedDeltas(prompts, SamplingParams(), asked.parser, asked.token_ids, "sample")
    pieces = [*deltas.more(tokens), *deltas.end(ended(tokens))]
    assert "".join(piece["content"] for piece in pieces) == "Nothing " and not deltas.calls_tools
    assert asked.parser.message("Nothing <tool", tokens, "s")[0] == {"role": "assistant", "content": "Nothing <tool"}


def test_one_call_at_most_without_parallel_calls(chat, parser, prompts):
    asked = chat(parser, messages=[USER], tools=TOOLS, parallel_tool_calls=False)
    tokens = [*prompts.encode(CALLS), prompts.tokenizer.eos_token_id]
    deltas = ParsedDeltas(prompts, SamplingParams(), asked.parser, asked.token_ids, "sample")
    list(deltas.more(tokens)), list(deltas.end(ended(tokens)))
    assert len(asked.parser.message(CALLS, tokens, "s")[0]["tool_calls"]) == len(deltas.message["tool_calls"]) == 1


def test_an_answer_whose_arguments_are_no_json_is_taken_back_with_its_tokens(chat, parser, prompts):
    """In each form in which clients send it: the conversation goes on."""
    cut = '<tool_call>\n{"name": "look", "arguments": {"a": 1'
    for text, end in ((CALLS, SampleEnd.STOP), (cut, SampleEnd.LENGTH), ("", SampleEnd.LENGTH)):
        asked = chat(parser, messages=[USER], tools=TOOLS)
        tokens = [*prompts.encode(text), *([prompts.tokenizer.eos_token_id] if end is SampleEnd.STOP else [])]
        deltas = ParsedDeltas(prompts, SamplingParams(), asked.parser, asked.token_ids, "sample")
        list(deltas.more(tokens)), list(deltas.end(ended(tokens, end, text=text)))
        whole, _ = asked.parser.message(text, tokens, "sample")
        if not tokens:
            assert chat(parser, messages=[USER, whole, USER], tools=TOOLS).token_ids
            continue
        asked.keep(whole, asked.token_ids, ended(tokens, end))
        for message in (whole, deltas.message, numbered(whole), whole | {"content": whole["content"] or None}):
            later = chat(parser, messages=[USER, message, USER], tools=TOOLS)
            assert later.token_ids
            if message is not deltas.message:  # a cut call is content there, and a call here
                assert later.token_ids[: len(asked.token_ids) + len(tokens)] == (*asked.token_ids, *tokens), message


def numbered(message: dict) -> dict:
    """With an index in each call, and the fields of answers that are empty."""
    calls = [call | {"index": number} for number, call in enumerate(message.get("tool_calls", ()))]
    return message | {"refusal": None, "annotations": [], "tool_calls": calls or None}


@pytest.mark.parametrize("text", ["The answer is ", "The answer is\n", "", "What"])
def test_an_answer_that_is_begun_goes_on_as_it_was_given(chat, prompts, text):
    begun = [USER, {"role": "assistant", "content": text}]
    for message in (begun[1], begun[1] | {"content": [{"type": "text", "text": text}]}):
        more = chat(messages=[USER, message], add_generation_prompt=False, continue_final_message=True)
        whole = prompts.decode(list(more.token_ids), special=True)
        expected = prompts.tokenizer.apply_chat_template(begun, continue_final_message=True, tokenize=False)
        assert whole == expected and whole.endswith(f"assistant\n{text}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_required_call_is_a_form_of_the_answer(chat, parser, prompts, choice):
    asked = chat(parser, messages=[USER], tools=TOOLS, tool_choice=choice, temperature=0.5)
    sampling = asked.sampling()
    assert sampling.temperature == 0.5 and "look" in sampling.structured_outputs.structural_tag
    assert form_refusal(sampling.structured_outputs) is None
    assert asked.parser.is_named == (choice != "required")


def test_a_conversation_with_calls_goes_to_the_template_as_objects(chat):
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "a door", "tool_call_id": "call-1"}]  # fmt: skip
    _, assistant, tool = ChatRequest(messages=messages).messages
    assert assistant.for_template()["tool_calls"][0]["function"] == {"name": "look", "arguments": {"a": 1}}
    assert tool.for_template() == {"role": "tool", "content": "a door", "tool_call_id": "call-1"}
    assert chat(messages=messages).token_ids


@pytest.mark.parametrize(
    ("request_of", "reason"),
    [
        ({"tools": TOOLS}, "no tool_parser is set"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}, "is none of `tools`"),
        ({"tool_choice": "required"}, "`tools` must be set"),
        ({"continue_final_message": True}, "set add_generation_prompt to false"),
        ({"chat_template_kwargs": {"chat_template": "{{x}}"}}, "chat_template is not the template's"),
        ({"tools": []}, "must not be an empty array"),
        (
            {"messages": [USER | {"content": [{"type": "image_url"}]}]},
            "Instruct takes text alone; remove it",
        ),
    ],
)
def test_a_chat_that_cannot_be_met_is_refused_in_one_line(chat, request_of, reason):
    with pytest.raises(ValueError, match=reason):
        chat(**{"messages": [USER]} | request_of)


def test_tools_and_another_form_are_refused_and_so_is_an_unknown_parser(chat, parser, prompts):
    with pytest.raises(ValueError, match="not together with another form"):
        chat(parser, messages=[USER], tools=TOOLS, response_format={"type": "json_object"})
    with pytest.raises(ValueError, match="tool_parser: 'none-such' is none of vLLM's: "):
        AnswerParser("none-such", None, prompts.tokenizer)


def pieces_of(prompts, asked, tokens, size, end=SampleEnd.STOP) -> ParsedDeltas:
    deltas = ParsedDeltas(prompts, SamplingParams(), asked.parser, asked.token_ids, "sample")
    for start in range(0, len(tokens), size):
        list(deltas.more(tokens[start : start + size]))
    list(deltas.end(ended(tokens, end)))
    return deltas


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_thoughts_are_a_field_of_their_own_whole_and_in_pieces(thinking, tools):
    prompts, parser = thinking
    asked = Chat(ChatRequest(messages=[USER], tools=tools), prompts, Conversations(1_000), parser)
    said = CALLS if tools else "I look."
    tokens = [*prompts.encode(THOUGHTS + said), prompts.tokenizer.eos_token_id]
    whole, thoughts = asked.parser.message(THOUGHTS + said, tokens, "sample")
    assert thoughts == len(prompts.encode("\nA lamp?\n"))
    assert whole["reasoning"].strip() == "A lamp?" and whole["content"].strip() == "I look."
    assert len(whole.get("tool_calls", ())) == (2 if tools else 0)
    for size in (1, 3, 100):
        deltas = pieces_of(prompts, asked, tokens, size)
        found = deltas.message
        assert deltas.thoughts == thoughts
        assert (found["content"].strip(), found["reasoning"].strip()) == ("I look.", "A lamp?")
        assert found["tool_calls"] == whole.get("tool_calls", [])
    cut = prompts.encode(THOUGHTS)[:3]
    assert "reasoning" in pieces_of(prompts, asked, cut, 1, SampleEnd.LENGTH).message
    assert asked.parser.message("<think>\nA la", cut, "s")[0]["content"] is None


def test_thoughts_that_come_back_keep_their_tokens_where_the_template_keeps_them(thinking):
    prompts, parser = thinking
    memory = Conversations(1_000)
    first = Chat(ChatRequest(messages=[USER], tools=TOOLS), prompts, memory, parser)
    text = f"{THOUGHTS}I look.\n{CALL % 1}"
    tokens = [token for one in text for token in prompts.encode(one)] + [prompts.tokenizer.eos_token_id]
    message, _ = first.parser.message(text, tokens, "sample")
    first.keep(message, first.token_ids, ended(tokens))
    result = {"role": "tool", "content": "no", "tool_call_id": message["tool_calls"][0]["id"]}
    before = (*first.token_ids, *tokens)

    def after(*messages):
        asked = ChatRequest(messages=[USER, *messages], tools=TOOLS)
        return Chat(asked, prompts, memory, parser).token_ids

    assert after(message, result)[: len(before)] == before
    without = {name: part for name, part in message.items() if name != "reasoning"}
    assert "A lamp" not in prompts.decode(list(after(without, result)), special=True), "as the template has it"
    asked_again = after(message, result, {"role": "user", "content": "Sure?"})
    assert "A lamp" not in prompts.decode(list(asked_again), special=True), "the template drops them"


def test_an_answer_with_a_form_has_no_thoughts(thinking):
    prompts, parser = thinking

    def asked(**more):
        return Chat(ChatRequest(messages=[USER], **more), prompts, Conversations(1_000), parser)

    assert asked(response_format={"type": "json_object"}).parser is None
    required = asked(tools=TOOLS, tool_choice="required").parser
    assert required.message(CALL % 1, (), "s")[0]["tool_calls"]
    assert "reasoning" not in required.message(THOUGHTS, (), "s")[0]
    with pytest.raises(ValueError, match="reasoning_parser: 'none-such' is none of vLLM's: "):
        AnswerParser(None, "none-such", prompts.tokenizer)


def test_special_tokens_beside_thoughts_are_shown_where_they_are_wanted(thinking):
    prompts, _ = thinking
    parser = AnswerParser(None, "deepseek_r1", prompts.tokenizer)
    for skips in (True, False):
        request = ChatRequest(messages=[USER], skip_special_tokens=skips)
        assert Chat(request, prompts, Conversations(1_000), parser).parser.special is not skips
