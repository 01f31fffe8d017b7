"""Chunks of an engine from requests of the grammar: checked as a driver's requests are, or made by hand.

The checks are the product's own: `checked` messages, prompts prepared as the coordinator does, adapters bound, and the
line's frames. A chunk made by hand passes no check, since an engine must hold by itself.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tailrace.deployments.batches.adapter_book import AdapterBook
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.channel.frames import Start, decode, encode
from tailrace.deployments.features.prompt_features import FeatureItem, ItemData, PromptFeatures
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import Rejected, RolloutBatch, checked
from tailrace.deployments.messages.sampling import SamplingParams, StructuredOutputs
from tailrace.deployments.messages.session import SampleRequest
from tailrace.lab.fuzz.engine.grammar import BATCH, HAND, SESSION
from tailrace.lab.fuzz.engine.values import expanded
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.protocol.events import ChunkEnd

MOST_TOKENS = 24
"""Number of tokens after which the driver of a checked request leaves. Longer answers take the time of other
requests."""


@dataclass(slots=True)
class OddSample:
    """A request that an engine runs, in pieces of `piece` tokens. `tokens`, `results`: so far."""

    chunk: ChunkRequest
    piece: int
    tokens: list[int] = field(default_factory=list)
    results: list = field(default_factory=list)
    given_up: bool = False  # its driver has left, with the tokens so far

    def next_chunk(self) -> ChunkRequest | None:
        """Returns the chunk that continues the sample, or None at its end."""
        if not self.results:
            return replace(self.chunk, max_tokens=self.piece)
        last, left = self.results[-1], self.chunk.max_tokens - len(self.tokens)
        is_cut = len(last.token_ids) < min(self.piece, left + len(last.token_ids))
        if last.end is not ChunkEnd.LENGTH or left < 1 or is_cut:
            return None
        context = np.concatenate([self.chunk.token_ids, np.array(self.tokens, np.int32)])
        name = f"{self.chunk.chunk_id}:{len(self.tokens)}"
        return replace(self.chunk, chunk_id=name, token_ids=context, max_tokens=min(self.piece, left))

    def take(self, result) -> None:
        self.results.append(result)
        self.tokens += result.token_ids.tolist()


class RequestEntry:
    """Turns requests into chunks. `model`: a local folder. `max_model_len`: tokens of a context."""

    def __init__(self, model: str, max_model_len: int):
        self.prompts, self._adapters = Prompts(model, max_model_len), AdapterBook()

    def enter(self, request: dict[str, Any], name: str, group_id: str) -> OddSample | str:
        """Returns the sample, or the reason why a driver's request is refused. `name`: id of its first chunk.
        `group_id`: group of the round's mates; they and odd samples draft from each other."""
        message = expanded(request["message"])
        if request["way"] == HAND:
            chunk = by_hand(message, name, group_id)
            return OddSample(chunk, chunk.max_tokens)
        asked = checked(RolloutBatch if request["way"] == BATCH else SampleRequest, message)
        if isinstance(asked, Rejected):
            return asked.reason
        group = asked.group if request["way"] == SESSION else asked.groups[0]
        prepared = self.prompts.prepare_group(group)
        if not isinstance(prepared, Rejected):
            versions = asked.min_adapter_versions if request["way"] == BATCH else {}
            prepared = self._adapters.bound(prepared, versions)
        if isinstance(prepared, Rejected):
            return prepared.reason
        index, turn, piece, seed, step = 0, 0, None, 0, 0
        if request["way"] == SESSION:
            index, turn, piece = asked.index, asked.turn, asked.chunk_tokens
        else:
            seed, step = asked.seed, asked.step
        forced = None if group.forced_token_ids is None else np.array(group.forced_token_ids[0], np.int32)
        chunk = ChunkRequest(
            chunk_id=name,
            sample_key=sample_key(seed, step, group.prompt_id, index, turn),
            token_ids=np.array(prepared.token_ids, np.int32),
            prompt_tokens=len(prepared.token_ids),
            max_tokens=min(prepared.max_tokens, MOST_TOKENS),
            sampling=group.sampling,
            weights_version=0,
            draft=plan(group_id, index % 1_000 + 3),
            forced=forced,
            features=prepared.features,
        )
        chunk = decode(encode(Start(chunk))).chunk
        return OddSample(chunk, min(chunk.max_tokens, piece or chunk.max_tokens))


def plan(group_id: str, index: Any, expected: Any = MOST_TOKENS, tokens: Any = 4) -> DraftPlan:
    """Returns a plan of drafts from the group of the mates."""
    return DraftPlan(
        group=GroupRef(group_id, "mates"),
        sample_index=index,
        epoch=0,
        expected_tokens=expected,
        class_starts=(0, 0),
        policy=FixedBudget.model_construct(tokens=tokens),
    )


def by_hand(message: dict[str, Any], name: str, group_id: str) -> ChunkRequest:
    """Returns a chunk with these fields, unchecked. Its other fields are those of a usual chunk."""
    given = dict(message)
    if given.get("chunk_id") == "odd":
        given["chunk_id"] = name
    tokens = array(given["token_ids"])
    given |= {"token_ids": tokens, "sampling": unchecked(given["sampling"])}
    usual = {"sample_key": 1, "prompt_tokens": len(tokens) if np.ndim(tokens) else 1, "weights_version": 0}
    if given.get("forced") is not None:
        given["forced"] = array(given["forced"])
    if isinstance(given.get("adapter"), list) and len(given["adapter"]) == len(Adapter._fields):
        given["adapter"] = Adapter(*given["adapter"])
    if isinstance(given.get("features"), list):
        places = [(place, ItemData(modality, "0" * 64, content=b"\x80")) for modality, *place in given["features"]]
        items = tuple(FeatureItem(*place, data) for place, data in places)
        given["features"] = PromptFeatures(items, "0" * 64)
    if "draft" in given:
        given["draft"] = plan(group_id, **{"index": 3} | given["draft"])
    return ChunkRequest(**usual | given)


def array(value: Any) -> Any:
    """Returns tokens as an array, int32 where they fit; a value that is no list stays as it is."""
    if not isinstance(value, list):
        return value
    try:
        return np.array(value, np.int32)
    except (ValueError, TypeError, OverflowError):
        return np.array(value) if not any(isinstance(one, list) for one in value) else value


def unchecked(fields: Any) -> Any:
    """Returns sampling parameters with these fields; lists are tuples, as messages have them."""
    if not isinstance(fields, dict):
        return fields
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if isinstance(bias := fields.get("logit_bias"), dict):
        values["logit_bias"] = tuple((_number(token), value) for token, value in bias.items())
    elif isinstance(bias, list):
        values["logit_bias"] = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in bias)
    if isinstance(form := fields.get("structured_outputs"), dict):
        form = {"json_schema" if name == "json" else name: value for name, value in form.items()}
        for name in form.keys() & {"json_schema", "structural_tag"}:
            form[name] = form[name] if isinstance(form[name], str) else json.dumps(form[name])
        if isinstance(form.get("choice"), list):
            form["choice"] = tuple(form["choice"])
        values["structured_outputs"] = StructuredOutputs.model_construct(**form)
    return SamplingParams.model_construct(**values)


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text
