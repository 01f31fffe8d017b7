"""Checks against impossible events, by the event alone or by the event and its chunk, and against invalid answers of
policies. Called by `RolloutCore` and its books.

Invariant: a check reads and raises, and changes nothing. Checks that need the core's books are in those books.
"""

from collections.abc import Collection
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from tailrace.policies.core.fit_queue import MAX_NEED_TOKENS
from tailrace.policies.core.request_buffer import Chunk, Sample
from tailrace.policies.core.sample_states import HELD
from tailrace.policies.families.registry import name_of
from tailrace.policies.protocol.events import (
    ChunkFinished,
    Event,
    IllegalEvent,
    LengthsSeen,
    PoolReported,
    ReplicaJoined,
    ReplicaMeasured,
    SampleReturned,
    SamplesSubmitted,
)


def check_groups(event: SamplesSubmitted) -> None:
    """Checks that a batch names each of its groups once, and that each has tokens to generate."""
    if len({spec.group_id for spec in event.groups}) < len(event.groups):
        raise IllegalEvent(f"batch {event.batch_id!r} repeats a group id")
    if not 0 < event.share < float("inf"):
        raise IllegalEvent(f"batch {event.batch_id!r} has share {event.share}; give a number above 0")
    for spec in event.groups:
        if min(spec.prompt_tokens, spec.max_tokens) < 1 or spec.samples < 0:
            raise IllegalEvent(f"{spec}: prompt_tokens and max_tokens must be at least 1, samples at least 0")
        if spec.chunk_tokens is not None and spec.chunk_tokens < 1:
            raise IllegalEvent(f"{spec.group_id}: chunks of {spec.chunk_tokens} tokens; give 1 or more")
        if any(tokens < 0 for epoch in spec.past_lengths for tokens in epoch):
            raise IllegalEvent(f"{spec.group_id}: no answer had a negative length")
        begun = {one.index: one.tokens for one in spec.begun}
        if len(begun) < len(spec.begun) or not begun.keys() <= set(range(spec.samples)):
            raise IllegalEvent(f"{spec.group_id}: begun samples {[one.index for one in spec.begun]} of {spec.samples}")
        if not all(0 < tokens <= spec.max_tokens for tokens in begun.values()):
            raise IllegalEvent(f"{spec.group_id}: begun with {list(begun.values())} tokens of {spec.max_tokens}")
        if not spec.hold_s >= 0:
            raise IllegalEvent(f"{spec.group_id}: hold_s is {spec.hold_s}; give seconds, or inf")
        if spec.prediction is not None and not (
            0 <= spec.prediction.quality <= 1 and abs(spec.prediction.number) < inf
        ):
            raise IllegalEvent(f"{spec.group_id}: {spec.prediction}; give a number, and a quality of 0 to 1")
        if spec.prompt_tokens + spec.max_tokens > MAX_NEED_TOKENS:
            raise IllegalEvent(f"{spec.group_id}: prompt and answer together exceed {MAX_NEED_TOKENS} tokens")


def check_lengths(event: LengthsSeen) -> None:
    if any(tokens < 0 for past, last in event.prompts for epoch in (*past, last) for tokens in epoch):
        raise IllegalEvent("no answer had a negative length")


def check_join(event: ReplicaJoined) -> None:
    if event.block_tokens < 1 or min(event.kv_capacity_blocks, event.max_running, event.draft_tokens) < 0:
        raise IllegalEvent(f"{event}: no replica has such sizes")


def check_finish(event: ChunkFinished, chunk: Chunk) -> None:
    if not 0 <= event.new_tokens <= chunk.max_tokens:
        raise IllegalEvent(f"{event.chunk_id}: {event.new_tokens} tokens, asked for at most {chunk.max_tokens}")
    if event.weights_version != chunk.weights_version:
        raise IllegalEvent(
            f"{event.chunk_id}: made by weights {event.weights_version}, started under {chunk.weights_version}"
        )
    if not 0 <= event.accepted_tokens <= event.drafted_tokens:
        raise IllegalEvent(f"{event.chunk_id}: {event.accepted_tokens} of {event.drafted_tokens} draft tokens accepted")
    if not 0 <= event.tested_tokens <= event.drafted_tokens:
        raise IllegalEvent(f"{event.chunk_id}: {event.tested_tokens} of {event.drafted_tokens} draft tokens tested")
    if not 0 <= event.model_accepted <= event.model_tested:
        raise IllegalEvent(f"{event.chunk_id}: {event.model_accepted} of {event.model_tested} drafts of a model right")
    if chunk.beaten:
        return  # its sample continues elsewhere
    context_tokens = chunk.sample.context_tokens + event.new_tokens
    if not 0 <= event.stored_tokens <= context_tokens:
        raise IllegalEvent(f"{event.chunk_id}: {event.stored_tokens} tokens stored, of a context of {context_tokens}")


def check_return(event: SampleReturned, sample: Sample) -> None:
    if sample.state is not HELD:
        raise IllegalEvent(f"{event.sample_id} is {sample.state.value}, not between two turns")
    if event.outside_tokens < 0 or event.max_tokens < 1 or not event.hold_s >= 0:
        raise IllegalEvent(f"{event}: no turn is like that")
    if sample.context_tokens + event.outside_tokens + event.max_tokens > MAX_NEED_TOKENS:
        raise IllegalEvent(f"{event.sample_id}: context and answer together exceed {MAX_NEED_TOKENS} tokens")


def check_measured(event: ReplicaMeasured) -> None:
    """Checks that all figures are finite and none is negative, and that steps are points of a line."""
    one = event.performance
    figures = (*one.step_tokens, *one.step_seconds, one.chunk_s, one.drafts, one.context_token_s,
               one.context_tokens, one.fetch_base_s, one.fetch_token_s,
               one.prefill_token_s, *one.drafter_samples, *one.drafter_seconds, one.start_s)  # fmt: skip
    drafter = len(one.drafter_samples) == len(one.drafter_seconds)
    grows = all(a < b for points in (one.step_tokens, one.drafter_samples) for a, b in pairwise(points))
    tests = all(0 <= of.right <= of.tested < inf for of in one.acceptance)
    if not (len(one.step_tokens) == len(one.step_seconds) > 1 and drafter and grows and tests and 1 <= one.made < inf):
        raise IllegalEvent(f"{event}: no replica performs like that")
    if not all(0 <= figure < inf for figure in figures):
        raise IllegalEvent(f"{event}: no replica is as fast as that")


def check_pool(event: PoolReported) -> None:
    if min(event.capacity_tokens, event.used_tokens) < 0:
        raise IllegalEvent(f"{event}: no pool is like that")


class WrongAnswer(ValueError):
    """An invalid answer of a policy. The text names the policy, its answer and the right kind."""

    def __init__(self, policy: Any, method: str, answer: object, wanted: str):
        given = repr(answer)
        given = f"{given[:80]}..." if len(given) > 80 else given
        super().__init__(f"policy {name_of(policy)}: {method} answered {given}; {wanted} is wanted")


def checked_count(policy: Any, method: str, answer: object, minimum: int, maximum: int = MAX_NEED_TOKENS) -> int:
    """Returns an answer that is an integer from `minimum` to `maximum`."""
    if (answer.__class__ is int or isinstance(answer, np.integer)) and minimum <= answer <= maximum:
        return answer
    raise WrongAnswer(policy, method, answer, f"an integer from {minimum} to {maximum}")


def checked_home(policy: Any, answer: object, ready: Collection[str]) -> str | None:
    """Returns an answer that is one of the ready replicas, or None."""
    if answer is None or answer in ready:
        return answer
    raise WrongAnswer(policy, "bind", answer, "None or the id of a ready replica")


_CHECKS = {
    SamplesSubmitted: check_groups,
    LengthsSeen: check_lengths,
    ReplicaJoined: check_join,
    ReplicaMeasured: check_measured,
    PoolReported: check_pool,
}


def check_event(event: Event) -> None:
    """Raises IllegalEvent if an event is impossible whatever the core holds."""
    if (check := _CHECKS.get(type(event))) is not None:
        check(event)
