"""verl's single-sample requests as groups of Tailrace.

Invariant: the name, index and settings of a request, and so its tokens, are a function of its arguments and of nothing
about their arrival. Pure; called by the server.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic import ValidationError

from tailrace.deployments.messages.rollout import PromptGroup, SamplingParams

NEUTRAL = {"n": 1}
"""Values of fields that Tailrace refuses, at which they change nothing."""

LIMITS = ("max_tokens", "max_new_tokens")


class Lengths(NamedTuple):
    """verl's `rollout.prompt_length` and `rollout.response_length`, in tokens."""

    prompt: int
    response: int


class Asked(NamedTuple):
    """One sample of a group. `keyed_by`: on which name its tokens depend, besides prompt, settings and weights."""

    group: PromptGroup
    index: int
    step: int
    keyed_by: str

    def digest(self) -> str:
        """Equal for the requests of one group alone."""
        text = f"{self.step}\0{self.group.model_dump_json()}"
        return blake2b(text.encode(), digest_size=12).hexdigest()


def asked(
    prompt_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    request_id: str,
    lengths: Lengths,
    group: str | None = None,
    index: int | None = None,
    of: int | None = None,
    step: int = 0,
) -> Asked:
    """The sample that a request asks for.

    With `of`, the size of the group, all its requests join: the group's samples are made together. Without, the sample
    is a group of its own, named `GROUP.INDEX`. Without `group` and `index` its name is a digest of `request_id`.
    Raises ValueError, in one line, for a parameter that is not honoured.
    """
    prompt = tuple(int(token) for token in prompt_ids)
    limit = next((sampling_params[name] for name in LIMITS if sampling_params.get(name) is not None), None)
    if limit is None:  # as verl's own servers
        limit = min(lengths.response, lengths.prompt + lengths.response - len(prompt))
    samples, place, keyed_by = 1, 0, "group"
    if group is None or index is None:
        name, keyed_by = f"request-{_digest(request_id, prompt)}", "request_id"
    elif of is not None and 0 <= index < of:
        name, samples, place = str(group), int(of), int(index)
    else:
        name = f"{group}.{index}"
    try:
        made = PromptGroup(
            prompt_id=name,
            token_ids=prompt,
            samples=samples,
            max_tokens=max(1, int(limit)),
            sampling=SamplingParams(**_sampling(sampling_params)),
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place_text = ".".join(map(str, first["loc"])) or "sampling_params"
        raise ValueError(f"{place_text}: {first['msg'].removeprefix('Value error, ')}") from error
    if made.sampling.wants_more:
        raise ValueError("prompt_logprobs, top_logprobs, sampling_mask: not supported; verl's answer has no field")
    return Asked(made, place, int(step), keyed_by)


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without neutral values, limits and the wish for logprobs."""
    rest = {name: value for name, value in given.items() if name not in (*LIMITS, "logprobs") and value is not None}
    return {name: value for name, value in rest.items() if name not in NEUTRAL or value != NEUTRAL[name]}


def _digest(request_id: str, prompt: tuple[int, ...]) -> str:
    return blake2b(f"{request_id}\0{prompt}".encode(), digest_size=12).hexdigest()
