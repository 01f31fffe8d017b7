"""Answers of the gateway's routes, in vLLM's forms, with two fields more in each choice.

`weight_versions`: spans of tokens by weights version, as in vLLM 0.32's token-in-token-out answers. `tailrace`: the
seed, step, group and index that the tokens depend on, and the digests of the weights.
"""

import time
from collections.abc import Iterable, Sequence
from secrets import token_hex

from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import ChatRequest, CompletionRequest, TokensRequest
from tailrace.app.gateway.service import ServedModel
from tailrace.deployments.messages.rollout import SampleResult
from tailrace.deployments.messages.session import SampleAnswer
from tailrace.policies.protocol.actions import SampleEnd

FINISH = {SampleEnd.STOP: "stop", SampleEnd.LENGTH: "length", SampleEnd.CANCELLED: "abort"}


def completion(
    request: CompletionRequest, model: ServedModel, naming: Naming, answers: list[list[SampleAnswer]]
) -> dict:
    choices = []
    for answer in (one for of_prompt in answers for one in of_prompt):
        sample = answer.sample
        choice = {"index": len(choices), "text": sample.text, "logprobs": None} | _end(naming, answer)
        if request.logprobs is not None:
            choice["logprobs"] = _completion_logprobs(sample, model, bool(request.return_tokens_as_token_ids))
        choices.append(choice | _ids(request.return_token_ids, answer))
    return _answer("cmpl", "text_completion", model, choices, answers)


def chat_completion(
    request: ChatRequest, model: ServedModel, naming: Naming, answers: list[list[SampleAnswer]]
) -> dict:
    choices = []
    for answer in answers[0]:
        message = {"role": "assistant", "content": answer.sample.text}
        choice = {"index": len(choices), "message": message, "logprobs": None} | _end(naming, answer)
        if request.logprobs:
            as_ids = bool(request.return_tokens_as_token_ids)
            choice["logprobs"] = {"content": list(_logprob_contents(answer.sample, model, as_ids))}
        choices.append(choice | _ids(request.return_token_ids, answer))
    found = _answer("chatcmpl", "chat.completion", model, choices, answers)
    if request.return_token_ids:
        found["prompt_token_ids"] = list(answers[0][0].prompt_token_ids)
    return found


def tokens(request: TokensRequest, model: ServedModel, naming: Naming, answers: list[list[SampleAnswer]]) -> dict:
    choices = []
    for answer in answers[0]:
        choice = {"index": len(choices), "token_ids": list(answer.sample.token_ids), "logprobs": None}
        if request.sampling_params.logprobs is not None:
            contents = _logprob_contents(answer.sample, model, as_ids=True)  # as prime-rl's renderers want them
            choice["logprobs"] = {"content": list(contents)}
        choices.append(choice | _end(naming, answer))
    found = _answer("gen", "generate", model, choices, answers)
    named = {} if request.request_id is None else {"request_id": request.request_id}
    prompt = list(answers[0][0].prompt_token_ids) if request.return_token_ids else None
    return found | {"request_id": found["id"], "prompt_token_ids": prompt, "prompt_logprobs": None} | named


def models(model: ServedModel) -> dict:
    entry = {"id": model.name, "object": "model", "created": 0, "owned_by": "tailrace", "root": model.root}
    return {"object": "list", "data": [entry | {"parent": None, "max_model_len": model.max_model_len}]}


def failures(answers: Iterable[list[SampleAnswer]]) -> list[str]:
    """Errors of samples that the service has given up."""
    return [one.sample.error or "" for of in answers for one in of if one.sample.finish_reason is SampleEnd.FAILED]


def _answer(
    prefix: str, kind: str, model: ServedModel, choices: list[dict], answers: Sequence[list[SampleAnswer]]
) -> dict:
    prompt = sum(len(of_prompt[0].prompt_token_ids) for of_prompt in answers)
    made = sum(len(one.sample.token_ids) for of_prompt in answers for one in of_prompt)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return {
        "id": f"{prefix}-{token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        "choices": choices,
        "usage": usage,
    }


def _end(naming: Naming, answer: SampleAnswer) -> dict:
    sample = answer.sample
    digests = {str(one.weights_version): one.weights_digest for one in sample.segments}
    key = {"seed": naming.seed, "step": naming.step, "group": answer.group, "index": sample.sample_index}
    return {
        "finish_reason": FINISH[sample.finish_reason],
        "stop_reason": None,
        "weight_versions": weight_versions(sample),
        "tailrace": key | {"weights_digests": digests},
    }


def weight_versions(sample: SampleResult) -> list[dict]:
    """Spans of one weights version each, whichever replicas made them."""
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
        return {}
    return {"token_ids": list(answer.sample.token_ids), "prompt_token_ids": list(answer.prompt_token_ids)}


def _completion_logprobs(sample: SampleResult, model: ServedModel, as_ids: bool) -> dict:
    names = [f"token_id:{token}" if as_ids else model.prompts.piece(token) for token in sample.token_ids]
    offsets = [0]
    for name in names[:-1]:
        offsets.append(offsets[-1] + len(name))
    return {
        "tokens": names,
        "token_logprobs": list(sample.logprobs),
        "top_logprobs": [{name: logprob} for name, logprob in zip(names, sample.logprobs, strict=True)],
        "text_offset": offsets[: len(names)],
    }


def _logprob_contents(sample: SampleResult, model: ServedModel, as_ids: bool = False) -> Iterable[dict]:
    for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True):
        piece = model.prompts.piece(token)
        yield {
            "token": f"token_id:{token}" if as_ids else piece,
            "token_id": token,
            "logprob": logprob,
            "bytes": list(piece.encode()),
            "top_logprobs": [],
        }
