"""Turns a driver's prompts into token ids, and tokens into text. The only place that knows the tokenizer.

A prompt may be token ids, text or chat messages; a sample's text leaves special tokens out. A prompt that the model
cannot take gives a `Rejected` value, never an exception. Called by the coordinator and the command line.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from tailrace.deployments.batches.model_folder import end_tokens, names_media, tokenizer_of
from tailrace.deployments.batches.tokenizer_files import name_of_tokenizer, tokenizer_files
from tailrace.deployments.constraints.bad_words import word_tokens
from tailrace.deployments.constraints.form_check import FormCheck
from tailrace.deployments.constraints.request_check import foreign, sampling_refusal
from tailrace.deployments.context.history import prompt_key
from tailrace.deployments.features.kept_items import KeptItems
from tailrace.deployments.features.prompt_features import DataMissing, PromptFeatures
from tailrace.deployments.features.wire import Features
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.message import quoted
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RejectedBy, RolloutBatch
from tailrace.deployments.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """A group with its prompt in token ids, and `max_tokens` cut to the room that the model's context leaves.

    `adapter`: the present content of its adapter's name; see `AdapterBook`.
    """

    group: PromptGroup
    token_ids: tuple[int, ...]
    max_tokens: int
    prompt_key: str
    adapter: Adapter | None = None
    features: PromptFeatures | None = None


class Prompts:
    """Tokenizer of a local model folder, and the maximum sequence length, in tokens, of the engines.

    `tokenizer_name`: digest of the tokenizer's files, see `tokenizer_files`; empty if it has none.
    """

    def __init__(self, model: str, max_model_len: int):
        self._tokenizer = tokenizer_of(Path(model))
        self._vocabulary = len(self._tokenizer)
        self._ends = end_tokens(Path(model), self._tokenizer.eos_token_id)
        self.model, self.max_model_len = model, max_model_len
        self.is_multimodal = names_media(Path(model))
        self.tokenizer_name = name_of_tokenizer(tokenizer_files(Path(model)))

    def prepare(self, batch: RolloutBatch) -> list[Prepared] | Rejected:
        prepared = []
        for one in map(self.prepare_group, batch.groups):
            if isinstance(one, Rejected):
                return one
            prepared.append(one)
        return prepared

    def prepare_group(self, group: PromptGroup) -> Prepared | Rejected:
        """Encodes a group of a batch, session or HTTP request. Returns Rejected if no engine could run it."""
        by = RejectedBy.CONTENT
        try:
            token_ids = self._encode(group)
            reason = self._refusal(group, token_ids)
            features = None if reason is not None else self._features(group.features)
        except Exception as error:  # noqa: BLE001 - one prompt's error: tokenizers and chat templates raise many types
            by = RejectedBy.DATA if isinstance(error, DataMissing) else by
            reason = str(error) if isinstance(error, ValueError) else f"it cannot be encoded: {one_line(error)}"
        if reason is not None:
            return Rejected(reason=f"prompt {quoted(group.prompt_id)}: {' '.join(reason.split())}", by=by)
        named = "" if group.adapter is None else f"{group.adapter}\0"  # each adapter has its own lengths and answers
        text = named + self.decode(list(token_ids)) + ("" if features is None else f"\0{features.name}")
        max_tokens = min(group.max_tokens, self.max_model_len - len(token_ids))
        return Prepared(group, token_ids, max_tokens, prompt_key(text), features=features)

    def _refusal(self, group: PromptGroup, token_ids: tuple[int, ...]) -> str | None:
        """Returns in one line why an encoded group cannot run, or None."""
        if not token_ids:
            return "it is empty; give one token or more"
        if len(token_ids) >= self.max_model_len:
            return (  # clients look for these words, which are those of OpenAI
                f"this model's maximum context length is {self.max_model_len} tokens, and the prompt has "
                f"{len(token_ids)}: shorten it or raise engine.max_model_len"
            )
        given = ("token_ids", token_ids), *(("forced_token_ids", tokens) for tokens in group.forced_token_ids or ())
        for field, tokens in given:
            if (wrong := self.foreign(tokens)) is not None:
                return f"{field}: {wrong} is not in the vocabulary of {self._vocabulary} tokens"
        return self._rules_refusal(group.sampling)

    @cached_property
    def _rules_refusal(self) -> Callable[[SamplingParams], str | None]:
        return lru_cache(256)(self._find_rules_refusal)

    @cached_property
    def _items(self) -> KeptItems:
        return KeptItems()

    @cached_property
    def _forms(self) -> FormCheck:
        return FormCheck(self.model)

    def _find_rules_refusal(self, sampling: SamplingParams) -> str | None:
        words = word_tokens(sampling.bad_words, self.encode)
        if (reason := sampling_refusal(sampling, self._vocabulary, words, self._ends)) is not None:
            return reason
        form, stops = sampling.structured_outputs, sorted({*self._ends, *sampling.stop_token_ids})
        return None if form is None else self._forms.refusal(form, stops)

    def _features(self, given: Features | None) -> PromptFeatures | None:
        """Returns a prompt's features. Raises ValueError, one line, if they are invalid or the model takes none."""
        if given is None or given.is_empty:
            return None
        if not self.is_multimodal:
            raise ValueError(f"features: the model {Path(self.model).name} takes text alone; remove them")
        return self._items.features(given)

    def decode(self, token_ids: list[int], special: bool = False) -> str:
        """Returns the text of token ids. `special`: with special tokens, by their names."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=not special)

    def name(self, token_id: int) -> str:
        """Returns the token as the vocabulary spells it."""
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
        """Returns the first token that is not in the vocabulary, or None."""
        return foreign(token_ids, self._vocabulary)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Returns the token ids of plain text. `special`: with those that the tokenizer adds to a text."""
        return self._tokenizer.encode(text, add_special_tokens=special)

    def piece(self, token_id: int) -> str:
        """Returns the text of one token; a special token's name."""
        return self._tokenizer.decode([token_id])

    def _encode(self, group: PromptGroup) -> tuple[int, ...]:
        if group.token_ids is not None:
            return group.token_ids
        if group.text is not None:
            return tuple(self._tokenizer.encode(group.text))
        return tuple(self.encode(self.chat([message.model_dump() for message in group.messages])))

    def chat(self, messages: list[dict], add_generation_prompt: bool = True, **template) -> str:
        """Joins chat messages by the model's template. `template`: its arguments, such as `tools`."""
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False, **template
        )
