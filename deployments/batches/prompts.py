"""From a driver's prompts to token ids and back. The only place that knows the tokenizer.

A prompt may come as token ids, text or chat messages; a sample's text leaves special tokens out. A prompt that
the model cannot take is a `Rejected` value, never an exception. Called by the coordinator and the command line.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jinja2 import TemplateError

from tailrace.deployments.batches.tokenizer_files import name_of_tokenizer, tokenizer_files
from tailrace.deployments.constraints import form_check
from tailrace.deployments.context.history import prompt_key
from tailrace.deployments.features.item_check import item_refusal
from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.features.wire import Features
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RolloutBatch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A group with its prompt in token ids and `max_tokens` cut to the room that the model's context leaves.

    `adapter`: the present content of its adapter's name; see `AdapterBook`.
    """

    group: PromptGroup
    token_ids: tuple[int, ...]
    max_tokens: int
    prompt_key: str
    adapter: Adapter | None = None
    features: PromptFeatures | None = None


class Prompts:
    """Tokenizer of a local model folder, and the longest sequence (tokens) the engines take.

    `tokenizer_name`: of its files, see `tokenizer_files`; empty if it has none.
    """

    tokenizer_name = ""

    def __init__(self, model: str, max_model_len: int):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._vocabulary = len(self._tokenizer)
        self.model, self.max_model_len = model, max_model_len
        self._form_refusal = lru_cache(256)(form_check.refusal)
        self.is_multimodal = names_media(Path(model))
        self.tokenizer_name = name_of_tokenizer(tokenizer_files(Path(model)))

    def prepare(self, batch: RolloutBatch) -> list[Prepared] | Rejected:
        prepared = []
        for group in batch.groups:
            one = self.prepare_group(group)
            if isinstance(one, Rejected):
                return one
            prepared.append(one)
        return prepared

    def prepare_group(self, group: PromptGroup) -> Prepared | Rejected:
        try:
            token_ids = self._encode(group)
        except (ValueError, TemplateError) as error:  # no chat template, or one that does not take these messages
            return Rejected(reason=f"prompt {group.prompt_id!r}: cannot be encoded: {error}")
        left = self.max_model_len - len(token_ids)
        if not token_ids:
            return Rejected(reason=f"prompt {group.prompt_id!r} is empty; give one token or more")
        if left < 1:
            return Rejected(
                reason=f"prompt {group.prompt_id!r} has {len(token_ids)} tokens; the model's context is "
                f"{self.max_model_len}: shorten it or raise engine.max_model_len"
            )
        sampling = group.sampling
        given = [("forced_token_ids", tokens) for tokens in group.forced_token_ids or ()]
        given += [("allowed_token_ids", sampling.allowed_token_ids or ())]
        given += [("logit_bias", [token for token, _ in sampling.logit_bias])]
        for field, tokens in (("token_ids", token_ids), *given):
            if (wrong := self.foreign(tokens)) is not None:
                return Rejected(reason=f"prompt {group.prompt_id!r}: {field}: {wrong} is not in the vocabulary")
        form, features = sampling.structured_outputs, None
        reason = None if form is None else self._form_refusal(form)
        try:
            features = self._features(group.features)
        except ValueError as error:
            reason = reason or str(error)
        if reason is not None:
            return Rejected(reason=f"prompt {group.prompt_id!r}: {reason}")
        named = "" if group.adapter is None else f"{group.adapter}\0"  # an adapter has lengths and answers of its own
        text = named + self.decode(list(token_ids)) + ("" if features is None else f"\0{features.name}")
        return Prepared(group, token_ids, min(group.max_tokens, left), prompt_key(text), features=features)

    def _features(self, given: Features | None) -> PromptFeatures | None:
        """The features of a prompt. Raises ValueError, one line, if they are not sound or the model takes none."""
        if given is None or given.is_empty:
            return None
        if not self.is_multimodal:
            raise ValueError(f"features: the model {Path(self.model).name} takes text alone; remove them")
        features = PromptFeatures.of(given)
        for item in features.items:
            for part in filter(None, (item.content, item.metadata)):
                if (reason := item_refusal(part)) is not None:
                    raise ValueError(f"features: an item of {item.modality!r}: {reason}")
        return features

    def decode(self, token_ids: list[int], special: bool = False) -> str:
        """Text of token ids. `special`: with special tokens, by their names."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=not special)

    def name(self, token_id: int) -> str:
        """The token as the vocabulary has it."""
        return self._tokenizer.convert_ids_to_tokens(token_id)

    @property
    def tokenizer(self):
        """The tokenizer itself, for vLLM's parsers."""
        return self._tokenizer

    @property
    def closing(self) -> str:
        """The text of the token that ends a sequence; empty if the tokenizer has none."""
        return self._tokenizer.eos_token or ""

    def foreign(self, token_ids: Iterable[int]) -> int | None:
        """The first token that is not in the vocabulary, or None."""
        return next((token for token in token_ids if not 0 <= token < self._vocabulary), None)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of plain text. `special`: with those that the tokenizer adds to a text."""
        return self._tokenizer.encode(text, add_special_tokens=special)

    def piece(self, token_id: int) -> str:
        """The text of one token; a special one by its name."""
        return self._tokenizer.decode([token_id])

    def _encode(self, group: PromptGroup) -> tuple[int, ...]:
        if group.token_ids is not None:
            return group.token_ids
        if group.text is not None:
            return tuple(self._tokenizer.encode(group.text))
        return tuple(self.encode(self.chat([message.model_dump() for message in group.messages])))

    def chat(self, messages: list[dict], add_generation_prompt: bool = True, **template) -> str:
        """Chat messages as the model's template joins them. `template`: its arguments, such as `tools`."""
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False, **template
        )


MEDIA = ("vision", "image", "img", "audio", "video", "visual")


def names_media(folder: Path) -> bool:
    """Whether a model's config.json has a key about images, videos or sounds. A model of text alone has none."""
    return any(word in key for key in json.loads((folder / "config.json").read_text()) for word in MEDIA)
