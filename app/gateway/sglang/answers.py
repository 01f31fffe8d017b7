"""Answers of `/generate` in SGLang's format: text, token ids and `meta_info` of each sample, whole or streamed.

`tailrace` in `meta_info` has what the tokens depend on, as on vLLM's routes. Source of names and formats: SGLang
0.5.23, `srt/managers/tokenizer_manager.py` and `schedule_batch.py` (finish reasons).
"""

from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence
from secrets import token_hex

import numpy as np

from tailrace.app.gateway.answer_text import stream_text, text_of
from tailrace.app.gateway.answers import end, finite
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.service import ServedModel, Wanted
from tailrace.app.gateway.sglang.requests import GenerateRequest
from tailrace.app.gateway.stream_answers import AnswerStream
from tailrace.app.gateway.stream_text import StreamText
from tailrace.deployments.messages.rollout import SampleResult
from tailrace.deployments.messages.session import SampleAnswer, SampleTokens
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.policies.protocol.actions import SampleEnd

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def generated(
    request: GenerateRequest, model: ServedModel, naming: Naming, answers: list[list[SampleAnswer]]
) -> dict | list[dict]:
    """Returns the samples, prompt by prompt; the object of the only one if the request is for one."""
    found = [
        _whole(request, model, naming, answer, request.id_of(prompt, number) or token_hex(16))
        for prompt, of_prompt in enumerate(answers)
        for number, answer in enumerate(of_prompt)
    ]
    return found[0] if request.is_single else found


class GenerateStream(AnswerStream):
    """Events of `/generate`: each has all of a sample so far."""

    request: GenerateRequest

    def __init__(self, request: GenerateRequest, model: ServedModel, naming: Naming, wanted: Wanted):
        super().__init__(request, model, naming, wanted)
        self._ids: defaultdict[int, str] = defaultdict(lambda: token_hex(16))
        self._texts: dict[int, StreamText] = {}
        self._so_far: dict[int, str] = defaultdict(str)
        self._parts: defaultdict[int, list[SampleTokens]] = defaultdict(list)

    def _event(self, choice: dict) -> dict:
        if self.request.is_single:
            choice.pop("index")
        return choice

    def _begin(self, number: int) -> Iterator[dict]:
        sampled = self.request.sampling_params
        special = not sampled.skip_special_tokens
        self._texts[number] = stream_text(self.model.prompts, self.wanted.sampling, special)
        self._ids[number] = self.request.id_of(*divmod(number, sampled.n)) or self._ids[number]
        yield from ()

    def _choices(self, number: int, part: SampleTokens, due: SampleTokens) -> Iterator[dict]:
        if part.answer is not None:
            yield _whole(self.request, self.model, self.naming, part.answer, self._ids[number])
            return
        self._so_far[number] += self._texts[number].more(part.token_ids)
        self._parts[number].append(due)
        if due.token_ids:
            prompt = self._prompts[number]
            known = _joined(self._parts[number])
            about = _about(self._ids[number], prompt, known) | {"finish_reason": None}
            if self.request.return_logprob:
                about |= _logprobs(self.request, known)
            yield {"text": self._so_far[number], "output_ids": list(known.token_ids), "meta_info": about}


def _joined(parts: Sequence[SampleTokens]) -> SampleTokens:
    names = "token_ids", "logprobs", "top_logprobs"
    return parts[0].model_copy(
        update={name: tuple(one for part in parts for one in getattr(part, name)) for name in names}
    )


def _whole(request: GenerateRequest, model: ServedModel, naming: Naming, answer: SampleAnswer, own_id: str) -> dict:
    sample, sampled = answer.sample, request.sampling_params
    ended = end(naming, answer)
    spans = ended["weight_versions"]
    about = _about(own_id, answer.prompt_token_ids, sample) | {
        "finish_reason": _finish(sample),
        "weight_versions": spans,
        "weight_version": spans[-1]["version"] if spans else None,
        "tailrace": ended["tailrace"],
    }
    if request.return_logprob:
        about |= _logprobs(request, sample) | {"input_token_logprobs": _of_prompt(request, answer)}
    if request.return_routed_experts and sample.token_ids:
        first = request.routed_experts_start_len
        about |= {"routed_experts": _routes(sample.routed_experts, first), "routed_experts_start_len": first}
    text = text_of(sample, model.prompts, not sampled.skip_special_tokens, sampled.no_stop_trim)
    prompt = {"prompt_token_ids": list(answer.prompt_token_ids)} if request.return_prompt_token_ids else {}
    return {"text": text, "output_ids": list(sample.token_ids), "meta_info": about} | prompt


def _about(own_id: str, prompt: Sequence[int], piece: SampleResult | SampleTokens) -> dict:
    return {"id": own_id, "prompt_tokens": len(prompt), "completion_tokens": len(piece.token_ids)}


def _finish(sample: SampleResult) -> dict:
    if sample.finish_reason is SampleEnd.STOP:
        return {"type": "stop", "matched": sample.token_ids[-1] if sample.stop_reason is None else sample.stop_reason}
    if sample.finish_reason is SampleEnd.LENGTH:
        return {"type": "length", "length": len(sample.token_ids)}
    return dict(ABORTED)


def _logprobs(request: GenerateRequest, piece: SampleResult | SampleTokens) -> dict:
    """Returns logprobs of the answer as triples: logprob, token id, and null for the token's text."""
    own = zip(piece.logprobs, piece.token_ids, strict=True)
    found = {
        "output_token_logprobs": [[finite(logprob), token, None] for logprob, token in own],
        "output_token_logprobs_length": len(piece.token_ids),
    }
    if request.top_logprobs_num:
        found["output_top_logprobs"] = [
            [[finite(logprob), token, None] for token, logprob in top] for top in piece.top_logprobs
        ]
    return found


def _of_prompt(request: GenerateRequest, answer: SampleAnswer) -> list[list]:
    """Returns logprobs of the prompt's tokens from `logprob_start_len` on, as triples; null for that of the first."""
    found = answer.sample.prompt_logprobs
    if found is None:
        return []
    values = [None, *map(finite, found.logprobs)]
    own = zip(values, answer.prompt_token_ids, strict=True)
    return [[value, token, None] for value, token in own][request.logprob_start_len :]


def _routes(routes: RoutedExperts | None, first: int) -> str:
    """Returns base64 of int32 [positions, layers, experts of a token], from position `first` on."""
    if routes is None:
        raise ValueError(
            "return_routed_experts: the engines keep none; their vllm_args need enable_return_routed_experts: true"
        )
    return b64encode(np.ascontiguousarray(routes.array[first:], np.int32).tobytes()).decode()
