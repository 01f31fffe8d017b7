"""Answers of the gateway's routes, in vLLM's formats, with two more fields in each choice.

`weight_versions`: spans of tokens by weights version, as in vLLM 0.32's token-in-token-out answers. `tailrace`: the
seed, step, group, index and turn that the tokens depend on, and the digests of the weights and of the adapter.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from secrets import token_hex

from tailrace.app.gateway.answer_text import text_for, text_of
from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import CompletionRequest, TokensRequest
from tailrace.app.gateway.service import ServedModel
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.rollout import SampleResult, Top
from tailrace.deployments.messages.session import SampleAnswer, SampleTokens
from tailrace.policies.protocol.actions import SampleEnd

NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
"""Keys of vLLM's messages whose values are not known here: clients read them without checking that they exist."""

FINISH = {SampleEnd.STOP: "stop", SampleEnd.LENGTH: "length", SampleEnd.CANCELLED: "abort"}


def completion(
    request: CompletionRequest, model: ServedModel, naming: Naming, answers: list[list[SampleAnswer]]
) -> dict:
    choices = []
    for answer in (one for of_prompt in answers for one in of_prompt):
        text = text_for(request, answer.sample, model.prompts)
        choice = {"index": len(choices), "text": text, "logprobs": None} | end(naming, answer)
        if request.logprobs is not None:
            choice["logprobs"], _ = completion_logprobs(
                answer.sample, model, bool(request.return_tokens_as_token_ids), 0
            )
        choice["prompt_logprobs"] = prompt_logprobs(answer, model)
        choices.append(choice | _ids(request.return_token_ids, answer))
    return _answer("cmpl", "text_completion", model, choices, answers)


def chat_completion(chat: Chat, model: ServedModel, naming: Naming, answers: list[list[SampleAnswer]]) -> dict:
    thoughts = 0
    request, choices = chat.request, []
    for answer in answers[0]:
        sample = answer.sample
        if chat.parser is None:
            message = {"role": "assistant", "content": text_for(request, sample, model.prompts)}
        else:
            name = naming.sample(chat.prompt, len(choices))
            text = text_of(sample, model.prompts, chat.parser.special, request.include_stop_str_in_output)
            message, count = chat.parser.message(text, sample.token_ids, name)
            thoughts += count
        seen = message if request.include_reasoning is not False else message | {"reasoning": None}
        choice = {"index": len(choices), "message": NULLS | seen, "logprobs": None} | end(naming, answer)
        if message.get("tool_calls"):
            choice["finish_reason"] = with_calls(choice["finish_reason"], chat)
        if request.logprobs:
            content = chat_logprobs(sample, model, bool(request.return_tokens_as_token_ids))
            choice["logprobs"] = {"content": content}
        chat.keep(message, answer.prompt_token_ids, sample)
        choices.append(choice | _ids(request.return_token_ids, answer))
    counted = thoughts if chat.finds_thoughts else None
    found = _answer("chatcmpl", "chat.completion", model, choices, answers, counted)
    found["prompt_token_ids"] = list(answers[0][0].prompt_token_ids) if request.return_token_ids else None
    return found | {"prompt_logprobs": prompt_logprobs(answers[0][0], model)}


def with_calls(finish_reason: str, chat: Chat) -> str:
    """Returns the finish_reason of an answer that calls tools: `stop` if the request chose the tool."""
    return "tool_calls" if finish_reason == "stop" and not chat.parser.is_named else finish_reason


def tokens(request: TokensRequest, model: ServedModel, naming: Naming, answers: list[list[SampleAnswer]]) -> dict:
    choices = []
    for answer in answers[0]:
        choice = {"index": len(choices), "token_ids": list(answer.sample.token_ids), "logprobs": None}
        if request.sampling_params.logprobs is not None:
            choice["logprobs"] = {"content": tokens_logprobs(answer.sample, model)}
        choice["sampling_mask"] = sampling_mask(answer.sample)
        choices.append(choice | end(naming, answer))
    found = _answer("gen", "generate", model, choices, answers)
    named = {} if request.request_id is None else {"request_id": request.request_id}
    prompt = list(answers[0][0].prompt_token_ids) if request.return_token_ids else None
    scores = prompt_logprobs(answers[0][0], model)
    same = {"request_id": found["id"], "output_mode": "tokens", "prompt_logprobs": scores}
    return found | same | {"prompt_token_ids": prompt} | placeholders(request) | named


def placeholders(request: TokensRequest) -> dict:
    """Returns the places of the prompt's features, with its token ids."""
    if request.features is None or not request.return_token_ids:
        return {}
    return {"mm_placeholders": request.features.model_dump()["mm_placeholders"]}


def models(model: ServedModel, adapters: Iterable[Adapter]) -> dict:
    """Returns the model, then the adapters with their versions and digests."""
    same = {"object": "model", "created": 0, "owned_by": "tailrace", "max_model_len": model.max_model_len}
    entries = [{"id": model.name, "root": model.root, "parent": None} | same]
    for one in adapters:
        content = {"version": one.version, "digest": one.digest}
        entries.append({"id": one.name, "root": one.path, "parent": model.name} | same | {"tailrace": content})
    return {"object": "list", "data": entries}


def failures(answers: Iterable[list[SampleAnswer]]) -> list[str]:
    """Returns the errors of samples that the service has given up."""
    return [one.sample.error or "" for of in answers for one in of if one.sample.finish_reason is SampleEnd.FAILED]


def _answer(
    prefix: str, kind: str, model: ServedModel, choices: list[dict], answers: Sequence[list[SampleAnswer]],
    thoughts: int | None = None,
) -> dict:  # fmt: skip
    prompt = sum(len(of_prompt[0].prompt_token_ids) for of_prompt in answers)
    made = sum(len(one.sample.token_ids) for of_prompt in answers for one in of_prompt)
    return head(prefix, kind, model) | {"choices": choices, "usage": usage(prompt, made, thoughts)}


def head(prefix: str, kind: str, model: ServedModel) -> dict:
    """Returns the fields with which answers and events begin. `prefix`: prefix of a new id."""
    return {"id": f"{prefix}-{token_hex(12)}", "object": kind, "created": int(time.time()), "model": model.name}


def usage(prompt_tokens: int, made_tokens: int, thoughts: int | None = None) -> dict:
    """Returns a request's tokens. `thoughts`: those of thoughts, or None if nothing finds them."""
    details = {} if thoughts is None else {"completion_tokens_details": {"reasoning_tokens": thoughts}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made_tokens,
        "total_tokens": prompt_tokens + made_tokens,
    } | details


def end(naming: Naming, answer: SampleAnswer) -> dict:
    """Returns the end of a choice, and all that its tokens depend on."""
    sample = answer.sample
    digests = {str(one.weights_version): one.weights_digest for one in sample.segments}
    key = {"seed": naming.seed, "step": naming.step, "group": answer.group, "index": sample.sample_index}
    key["turn"] = naming.turn
    if sample.segments and sample.segments[0].adapter_digest:
        key["adapter_digest"] = sample.segments[0].adapter_digest
    routes = {} if sample.routed_experts is None else {"routed_experts": sample.routed_experts.base64()}
    return routes | {
        "finish_reason": FINISH[sample.finish_reason],
        "stop_reason": sample.stop_reason,
        "weight_versions": weight_versions(sample),
        "tailrace": key | {"weights_digests": digests},
    }


def weight_versions(sample: SampleResult) -> list[dict]:
    """Returns spans of one weights version each, whichever replicas made them."""
    spans: list[dict] = []
    for segment in sample.segments:
        version = str(segment.weights_version)
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = segment.end
        else:
            spans.append({"version": version, "start": segment.start, "end": segment.end})
    return spans


def _ids(wanted: bool | None, answer: SampleAnswer) -> dict:
    if not wanted:
        return {"token_ids": None, "prompt_token_ids": None}
    return {"token_ids": list(answer.sample.token_ids), "prompt_token_ids": list(answer.prompt_token_ids)}


def completion_logprobs(
    piece: SampleResult | SampleTokens, model: ServedModel, as_ids: bool, offset: int
) -> tuple[dict, int]:
    """Returns the logprobs of a piece of an answer whose text begins at character `offset`, and the offset of the next
    piece.
    """
    names = [_name(token, model, as_ids) for token in piece.token_ids]
    offsets = list(accumulate(map(len, names), initial=offset))
    found = {
        "tokens": names,
        "token_logprobs": list(map(finite, piece.logprobs)),
        "top_logprobs": [
            {name: finite(logprob)} | {_name(token, model, as_ids): finite(other) for token, other in top}
            for name, logprob, top in zip(names, piece.logprobs, _tops(piece), strict=True)
        ],
        "text_offset": offsets[:-1],
    }
    return found, offsets[-1]


def chat_logprobs(piece: SampleResult | SampleTokens, model: ServedModel, as_ids: bool) -> list[dict]:
    return [
        _entry(token, logprob, model, as_ids) | {"top_logprobs": [_entry(*one, model, as_ids) for one in top]}
        for token, logprob, top in zip(piece.token_ids, piece.logprobs, _tops(piece), strict=True)
    ]


def tokens_logprobs(piece: SampleResult | SampleTokens, model: ServedModel) -> list[dict]:
    """Returns logprobs by token ids, as prime-rl's renderers expect them. Each token is in its `top_logprobs` if no
    other was requested, as in vLLM.
    """
    entries = chat_logprobs(piece, model, True)
    return [one | {"top_logprobs": one["top_logprobs"] or [without_top(one)]} for one in entries]


def without_top(entry: dict) -> dict:
    return {name: value for name, value in entry.items() if name != "top_logprobs"}


def _entry(token: int, logprob: float, model: ServedModel, as_ids: bool) -> dict:
    text = model.prompts.piece(token)
    name = f"token_id:{token}" if as_ids else text
    return {"token": name, "token_id": token, "logprob": finite(logprob), "bytes": list(text.encode())}


def sampling_mask(piece: SampleResult | SampleTokens) -> list[list[int]] | None:
    """Returns the kept tokens of each position; None if they were not requested."""
    return [list(kept) for kept in piece.sampling_mask] or None


def _tops(piece: SampleResult | SampleTokens) -> Sequence[Top]:
    return piece.top_logprobs or ((),) * len(piece.token_ids)


def prompt_logprobs(answer: SampleAnswer, model: ServedModel) -> list[dict | None] | None:
    """Returns for each token of the prompt but the first its own logprob, then the likeliest tokens', by id; or None if
    they were not requested.
    """
    found = answer.sample.prompt_logprobs
    if found is None:
        return None
    positions: list[dict | None] = [None]
    own = zip(answer.prompt_token_ids[1:], found.logprobs, found.ranks, found.top, strict=True)
    for token, logprob, rank, top in own:
        others = ((other, value, place) for place, (other, value) in enumerate(top, 1))
        positions.append(
            {
                str(one): {"logprob": finite(value), "rank": place, "decoded_token": model.prompts.piece(one)}
                for one, value, place in ((token, logprob, rank), *others)
            }
        )
    return positions


def finite(logprob: float) -> float:
    """Replaces infinity, which JSON does not have, by vLLM's value."""
    return max(logprob, -9999.0)


def _name(token: int, model: ServedModel, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else model.prompts.piece(token)
