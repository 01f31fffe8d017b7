"""Fields of vLLM's requests that are not honoured here: which have no effect, and which are refused.

Invariant: no field that could change a token is ignored. Source of names and defaults: vLLM 0.32,
`entrypoints/openai/{completion,chat_completion}/protocol.py`, `entrypoints/scale_out/token_in_token_out/protocol.py`.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar

from pydantic import ConfigDict, model_validator

from tailrace.app.gateway.edge.fields import RequestObject

IGNORED = {
    "user", "request_id", "detokenize", "cache_salt", "service_tier", "store",
    "metadata", "safety_identifier", "prompt_cache_key", "routed_experts_prompt_start", "session_id", "mm_payload",
    "spaces_between_special_tokens", "output_kind", "skip_clone", "skip_reading_prefix_cache",
    "return_mm_kwargs", "return_token_offsets", "truncation_side", "token_offsets",
    "length_penalty", "early_stopping",
}  # fmt: skip
"""Fields that change no token, and without which the answer is the same here."""

NEUTRAL = {
    "best_of": (1,), "echo": (False,), "use_beam_search": (False,),
    "suffix": ("",), "include_stop_str_in_output": (True, False), "priority": (0,), "top_logprobs": (0, 1),
    "truncate_prompt_tokens": (-1,), "thinking_token_budget": (-1,), "logprob_token_ids": ([],),
    "flat_logprobs": (False,), "include_reasoning": (True, False), "watermarking": (False,), "chat_template": ("",),
    "skip_special_tokens": (True, False), "output_mode": ("tokens",), "return_prompt_text": (False,),
    "media_io_kwargs": ({},), "mm_processor_kwargs": ({},), "vllm_xargs": ({},), "extra_args": ({},),
    "kv_transfer_params": ({},), "ec_transfer_params": ({},), "repetition_detection": ({},), "content_parts": ([],),
    "reasoning_ended": (True,), "output_text_buffer_length": (0,), "prompt_logprob_start": (0,),
}  # fmt: skip
"""Values without an effect, besides null."""


INSTEAD = {
    "best_of": "give n instead",
    "max_completion_tokens": "give max_tokens instead",
    "max_new_tokens": "give max_tokens instead",
    "stop_strings": "give stop instead",
} | dict.fromkeys(
    ("guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "give structured_outputs instead",
)
"""Fields of other servers and of older clients, with their substitute here."""


class HonouredFields(RequestObject):
    """An object of a request. Any field that it does not declare has no effect, or is refused. `ignored`, `neutral`:
    see above; `off`: values without an effect of any field; `instead`: substitutes by field.
    """

    model_config = ConfigDict(extra="allow")
    ignored: ClassVar[Collection[str]] = IGNORED
    neutral: ClassVar[Mapping[str, Collection]] = NEUTRAL
    off: ClassVar[Collection] = (None,)
    instead: ClassVar[Mapping[str, str]] = INSTEAD

    @model_validator(mode="after")
    def _honoured(self):
        for name, value in (self.model_extra or {}).items():
            if not (name in self.ignored or value in self.off or value in self.neutral.get(name, ())):
                raise ValueError(f"{name}: {self.instead.get(name, 'not honoured here; remove it')}")
        return self
