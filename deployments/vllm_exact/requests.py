"""Chunks as requests inside vLLM. Invariant: for any input, a refusal is one line and changes nothing.

Called by the stepper, on the engine's thread.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import blake2b

import numpy as np
from cachetools import LRUCache
from pydantic import ValidationError

from tailrace.deployments.constraints.bad_words import word_tokens
from tailrace.deployments.constraints.form_check import form_refusal
from tailrace.deployments.constraints.request_check import sampling_refusal
from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.features.vllm_inputs import prompt_input
from tailrace.deployments.messages.adapters import Adapter, digest_of
from tailrace.deployments.messages.chunk import ChunkRequest, KvPlan
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.errors import FeaturesRefused, RequestRefused, one_line
from tailrace.deployments.messages.message import first_line
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.kvpool.keys import cache_salt

CONVERSIONS = ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError, AssertionError
"""Kinds of errors raised by values that cannot become a request."""

PARTS = {
    "sampling": SamplingParams, "adapter": Adapter, "features": PromptFeatures, "kv": KvPlan, "draft": DraftPlan,
}  # fmt: skip
"""Types of a chunk's parts, each of which but the first may be missing."""

MAX_TRIED = 4_096
"""Maximum number of prompts with features, and of items, that are remembered as sound."""


class Requests:
    """The requests of one engine. `engine`: vLLM's LLMEngine in this process. `tolerance`: margin of close calls, in
    logits.

    `redraws`: close calls end a step, and KV is reserved for a request of max_model_len. Raises ValueError if none is
    left. `lora_of`: returns vLLM's LoRARequest of a loaded adapter.
    """

    def __init__(
        self,
        engine,
        tolerance: float = 0.0,
        redraws: bool = False,
        lora_of: Callable[[Adapter | None], object | None] = lambda adapter: None,
    ):
        self._engine, self.tolerance, self.redraws, self._lora_of = engine, tolerance, redraws, lora_of
        self._scheduler = engine.engine_core.engine_core.scheduler
        self.tokenizer = engine.get_tokenizer()
        self.eos_token_id = self.tokenizer.eos_token_id
        self._bad_words = lru_cache(256)(self._as_tokens)
        self._form_refusal = lru_cache(256)(form_refusal)
        model = engine.vllm_config.model_config
        self.vocabulary, self._max_model_len = model.get_vocab_size(), model.max_model_len
        self._no_features = features_unfit(model)
        self._tried = LRUCache(MAX_TRIED)  # prompts with features, and their items, that the model takes
        self.block_tokens = engine.vllm_config.cache_config.block_size
        # vLLM keeps one block, the null block, for itself.
        self.kv_blocks = self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        if redraws:
            longest = self._max_model_len + self._scheduler.num_lookahead_tokens
            self.kv_blocks -= -(-longest // self.block_tokens) + 1
        if self.kv_blocks < 1:
            raise ValueError("redraw_close_calls: a redraw of max_model_len fills the KV cache; raise kv_cache_gib")

    def limits(self) -> dict[str, int]:
        """Returns the limits that never change, by their names in EngineStats."""
        sizes = {"block_tokens": self.block_tokens, "kv_capacity_blocks": self.kv_blocks}
        return sizes | {"max_model_len": self._max_model_len}

    def refusal(self, chunk: ChunkRequest) -> str | None:
        """Returns in a few words why a chunk cannot run on this model, or None if it can."""
        try:
            return self._refusal(chunk)
        except CONVERSIONS as error:  # a value of a wrong type
            return one_line(error)

    def _refusal(self, chunk: ChunkRequest) -> str | None:
        if (reason := of_another_type(chunk)) is not None:
            return reason
        context = len(chunk.token_ids)
        if not 1 <= context < self._max_model_len:
            return f"context of {context} tokens, max_model_len is {self._max_model_len}"
        if not 1 <= chunk.prompt_tokens <= chunk.answer_start <= context:
            return f"the answer begins at {chunk.prompt_tokens}, {chunk.turn_start} in a context of {context} tokens"
        if chunk.max_tokens < 1:
            return f"max_tokens is {chunk.max_tokens}, at least 1 is needed"
        return self._values_refusal(chunk)

    def _values_refusal(self, chunk: ChunkRequest) -> str | None:
        for name, end in (("sample_key", 1 << 64), ("routes_from", len(chunk.token_ids) + 1)):
            if not 0 <= (number := getattr(chunk, name)) < end or number % 1:
                return f"{name} is {number}, not a whole number from 0 to {end - 1}"
        tokens = chunk.token_ids if chunk.features is None else None  # models put numbers of their own for items
        for name, values in (("the context", tokens), ("forced", chunk.forced)):
            # A step would fail with it; vLLM itself checks the largest one of the context only.
            if values is not None and values.size and (values.min() < 0 or values.max() >= self.vocabulary):
                return f"{name} has a token outside the vocabulary of {self.vocabulary}"
        return self._sampling_refusal(chunk.sampling)

    def _check_features(self, chunk: ChunkRequest) -> None:
        """Encodes items that are new here, and the prompt's positions: an error in a step would end all chunks.

        Raises FeaturesRefused, one line.
        """
        features, prompt = chunk.features, chunk.token_ids[: chunk.answer_start]
        if self._tried.get(whole := (features.name, blake2b(prompt.tobytes(), digest_size=16).digest())):
            return
        items = [(item.name, item.length) for item in features.items]
        new = [number for number, item in enumerate(items) if not self._tried.get(item)]
        reasons = [self._no_features or ("a placeholder is not in the prompt" if features.end > len(prompt) else None)]
        if reasons == [None]:
            reasons = self._engine.collective_rpc("features_refusal", args=(features, prompt.tolist(), new))
        if (reason := next((reason for reason in reasons if reason is not None), None)) is not None:
            raise FeaturesRefused(f"features: {reason}")
        self._tried.update(dict.fromkeys((whole, *items), True))

    def _sampling_refusal(self, sampling: SamplingParams) -> str | None:
        try:
            sampling = SamplingParams.model_validate(dict(sampling))
        except ValidationError as error:  # the sender of a chunk may not have checked it
            return first_line("sampling", error)
        try:
            words = self._bad_words(sampling.bad_words)
        except Exception as error:  # noqa: BLE001 - a tokenizer's refusals have any type
            return one_line(error) if not isinstance(error, ValueError) else str(error)
        ends = () if self.eos_token_id is None else (self.eos_token_id,)
        if (reason := sampling_refusal(sampling, self.vocabulary, words, ends)) is not None:
            return reason
        form = sampling.structured_outputs
        return None if form is None else self._form_refusal(form)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _as_tokens(self, bad_words: tuple[str, ...]) -> list[list[int]]:
        return word_tokens(bad_words, partial(self.tokenizer.encode, add_special_tokens=False))

    def add(
        self,
        name: str,
        chunk: ChunkRequest,
        token_ids: np.ndarray,
        max_tokens: int,
        kv: dict | None,
        private: bool = False,
    ):
        """Returns vLLM's scheduler-side Request that continues `token_ids` (int32) with the settings of `chunk`.

        `kv`: see PoolClient.wish. Outputs have the id `name`. `private`: no other request shares KV with this one, and
        close calls do not end its steps. Raises RequestRefused, one line, if vLLM or a conversion refuses it, and then
        vLLM keeps nothing of it; FeaturesRefused for the features of a prompt.
        """
        from vllm.exceptions import VLLMClientError

        try:
            return self._add(name, chunk, token_ids, max_tokens, kv, private)
        except RequestRefused:
            raise
        except (*CONVERSIONS, VLLMClientError) as error:  # the edge to vLLM: its refusals have several types
            kind = RequestRefused if chunk.features is None else FeaturesRefused  # an item may be too large for it
            raise kind(f"chunk {chunk.chunk_id}: {one_line(error)}") from error

    def _add(
        self, name: str, chunk: ChunkRequest, token_ids: np.ndarray, max_tokens: int, kv: dict | None, private: bool
    ):
        from vllm import SamplingParams as VllmParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        from tailrace.deployments.vllm_exact.sampler import ARGS_KEY, extra_args

        ends = self.redraws and not private
        bad_words = self._bad_words(chunk.sampling.bad_words)
        args = extra_args(chunk, self.eos_token_id, self.tolerance, ends, bad_words)
        params = VllmParams(
            max_tokens=max_tokens,
            temperature=0.0,  # unused: the exact sampler draws, by `extra_args`
            stop_token_ids=list(chunk.sampling.stop_token_ids),  # vLLM adds the model's end-of-sequence tokens
            ignore_eos=chunk.sampling.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            prompt_logprobs=chunk.sampling.prompt_logprobs if chunk.scores_prompt and not private else None,
            flat_logprobs=True,
            skip_reading_prefix_cache=True if private or chunk.scores_prompt else None,
            extra_args={ARGS_KEY: args},
        )
        if kv is not None:
            params.extra_args["kv_transfer_params"] = kv
        adapter = digest_of(chunk.adapter)
        salt = cache_salt(chunk.weights_version, chunk.weights_digest, adapter)
        if chunk.kv is not None:
            salt = cache_salt(chunk.kv.version, chunk.kv.digest, adapter)
        salt = f"{salt} {name}" if private else salt
        if chunk.features is None:
            prompt = tokens_input(token_ids.tolist(), cache_salt=salt)
        else:
            self._check_features(chunk)
            prompt = prompt_input(chunk.features, token_ids.tolist(), salt)
        try:
            request_id = self._engine.add_request(name, prompt, params, lora_request=self._lora_of(chunk.adapter))
        except Exception:  # vLLM may have taken a part of it
            self._forget_half(name)
            raise
        return self._scheduler.requests[request_id]

    def _forget_half(self, name: str) -> None:
        """Drops a request that vLLM has refused after it had taken a part of it."""
        states = self._engine.output_processor.request_states
        halves = [request_id for request_id, state in states.items() if state.external_req_id == name]
        self._engine.abort_request(halves, internal=True)

    def abort(self, request_id: str) -> None:
        """Stops a request, by vLLM's id, after the step in progress."""
        self._engine.abort_request([request_id], internal=True)


def of_another_type(chunk: ChunkRequest) -> str | None:
    """Returns in a few words which part of a chunk, made by hand or by another version, is not of its type, or None."""
    for name, kind in PARTS.items():
        if not isinstance(part := getattr(chunk, name), kind if name == "sampling" else kind | None):
            return f"{name} is a {type(part).__name__}, not {kind.__name__}"
    for name in ("token_ids",) if chunk.forced is None else ("token_ids", "forced"):
        if getattr(getattr(chunk, name), "dtype", np.dtype(object)).kind not in "iu":
            return f"{name} is no array of whole numbers"
    return None


def features_unfit(model) -> str | None:
    """Returns in a few words why a model takes no features, or None if it does. `model`: vLLM's ModelConfig."""
    if not model.is_multimodal_model:
        return "the model takes text alone"
    if model.is_mm_prefix_lm or model.is_encoder_decoder:
        return "the model attends to later tokens of an item, which chunks of the prompt would cut off"
    return None
