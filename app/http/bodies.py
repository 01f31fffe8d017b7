"""Bodies of the gateway's routes: converts a group of samples to a request, and an answer to results.

Invariant: floats are sent as the shortest decimals that restore them, so logprobs are exact. An answer over HTTP has no
`raw_logprobs`, timings, replicas or counts of drafts; those fields keep their defaults.
"""

from tailrace.deployments.messages.rollout import BatchSettings, PromptGroup, SampleResult, Segment
from tailrace.deployments.messages.session import SampleAnswer
from tailrace.policies.protocol.actions import SampleEnd

MAX_SAMPLES_OF_REQUEST = 1_024
"""Maximum `n` of the routes."""

ENDS = {"stop": SampleEnd.STOP, "length": SampleEnd.LENGTH, "abort": SampleEnd.CANCELLED}

NOT_CARRIED = ("priority", "share", "traceparent", "keep_trace")
"""Settings of a batch or session that no route accepts."""


def check_carried(settings: BatchSettings) -> None:
    """Raises ValueError, one line, for settings that would be lost on the way."""
    for name in NOT_CARRIED:
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise ValueError(f"{name}: HTTP does not carry it; remove it, or connect by Ray")


def named(settings: BatchSettings, group: str, index: int, turn: int = 0, hold_s: int = 0) -> dict[str, bytes]:
    """Returns headers that name the first sample of a request, and its turn. Raises ValueError for a group that no
    header can carry.
    """
    if group != group.strip() or not group.isprintable():
        raise ValueError(f"group {group!r}: over HTTP a name has printable characters, and no space at its ends")
    values = {"seed": settings.seed, "step": settings.step, "group": group, "index": index}
    values |= {name: value for name, value in (("turn", turn), ("hold", hold_s)) if value}
    return {f"x-tailrace-{name}": str(value).encode() for name, value in values.items()}


def request_of(group: PromptGroup, samples: int) -> tuple[str, dict]:
    """Returns route and body for `samples` samples of a group's prompt."""
    if group.forced_token_ids is not None:
        raise ValueError("forced_token_ids: HTTP does not carry it; connect by Ray to replay recorded answers")
    if group.prediction is not None:
        raise ValueError("prediction: HTTP does not carry it; remove it, or connect by Ray")
    if group.features is not None:
        raise ValueError("features: this client does not carry them; ask /inference/v1/generate, or connect by Ray")
    if group.sampling.wants_more:
        raise ValueError("top_logprobs, prompt_logprobs, sampling_mask: HTTP does not carry them here; ask the route")
    body = group.sampling.model_dump(mode="json", exclude_defaults=True)
    if "logit_bias" in body:
        body["logit_bias"] = dict(group.sampling.logit_bias)
    body |= {} if group.adapter is None else {"model": group.adapter}
    body |= {"n": samples, "max_tokens": group.max_tokens, "return_token_ids": True}
    if group.messages is not None:
        messages = [message.model_dump() for message in group.messages]
        return "/v1/chat/completions", body | {"messages": messages, "logprobs": True}
    prompt = list(group.token_ids) if group.text is None else group.text
    return "/v1/completions", body | {"prompt": prompt, "logprobs": 1, "return_tokens_as_token_ids": True}


def answers_of(body: dict, settings: BatchSettings, group: str) -> list[SampleAnswer]:
    """Returns the samples of an answer. Raises ValueError if it was not made by a gateway of Tailrace."""
    try:
        return [_answer(choice, settings, group) for choice in body["choices"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the answer is not of a gateway of Tailrace: {error!r} in it") from error


def failed_answer(settings: BatchSettings, group: PromptGroup, index: int, error: str) -> SampleAnswer:
    """Returns the answer for a sample that the service has given up."""
    sample = SampleResult(
        sample_index=index,
        token_ids=(),
        text="",
        logprobs=(),
        raw_logprobs=(),
        finish_reason=SampleEnd.FAILED,
        error=error,
    )
    return _as_answer(settings, group.prompt_id, group.token_ids or (), sample)


def _answer(choice: dict, settings: BatchSettings, group: str) -> SampleAnswer:
    key, logprobs = choice["tailrace"], choice["logprobs"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    content = logprobs.get("content")
    sample = SampleResult(
        sample_index=key["index"],
        token_ids=choice["token_ids"],
        text=text or "",
        logprobs=logprobs["token_logprobs"] if content is None else [one["logprob"] for one in content],
        raw_logprobs=(),
        finish_reason=ENDS[choice["finish_reason"]],
        stop_reason=choice.get("stop_reason"),
        segments=[_segment(span, key) for span in choice["weight_versions"]],
        routed_experts=choice.get("routed_experts"),
    )
    return _as_answer(settings, group, choice["prompt_token_ids"], sample)


def _segment(span: dict, key: dict) -> Segment:
    version = span["version"]
    return Segment(
        weights_version=int(version),
        weights_digest=key["weights_digests"].get(version, ""),
        adapter_digest=key.get("adapter_digest", ""),
        replica_id="",
        start=span["start"],
        end=span["end"],
    )


def _as_answer(settings: BatchSettings, group: str, prompt, sample: SampleResult) -> SampleAnswer:
    return SampleAnswer(
        batch_id=settings.batch_id,
        group=group,
        prompt_token_ids=prompt,
        prompt_key="",
        step=settings.step,
        sample=sample,
    )
