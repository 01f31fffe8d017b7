"""Forms of answers (JSON schema, regular expression, choice, grammar) as masks of logits, by vLLM's xgrammar backend.

Owns compiled grammars. Invariant: a mask depends on the form and on the answer's tokens alone. An answer that the form
does not allow, such as a replayed one, is no longer masked. Called by `RuleBook` in an engine, and by form_check.py.
"""

import json
from types import SimpleNamespace

import numpy as np
import torch


class AnswerForm:
    """State of one answer. `matcher`: xgrammar's GrammarMatcher at the start of the answer."""

    def __init__(self, matcher, bitmask: torch.Tensor):
        self._matcher, self._bitmask = matcher, bitmask
        self._taken = np.zeros(0, np.int32)  # tokens that the matcher has accepted

    def mask(self, row: torch.Tensor, answer: np.ndarray) -> None:
        """Sets to -inf, in row f32[V], the tokens that may not follow `answer`; none if it left the form or ended."""
        from xgrammar import apply_token_bitmask_inplace

        if self._follow(answer) and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._bitmask, 0)
            apply_token_bitmask_inplace(row.unsqueeze(0), self._bitmask.to(row.device))

    def allows_any(self) -> bool:
        """Returns whether an answer can begin, or be empty."""
        self._matcher.fill_next_token_bitmask(self._bitmask, 0)
        return bool(self._bitmask.any())

    def _follow(self, answer: np.ndarray) -> bool:
        """Moves the matcher to the end of `answer`; returns whether it got there."""
        shared = min(len(self._taken), len(answer))
        differ = np.flatnonzero(self._taken[:shared] != answer[:shared])
        shared = int(differ[0]) if differ.size else shared
        if len(self._taken) > shared:
            self._matcher.rollback(len(self._taken) - shared)
        taken = shared
        for token in answer[shared:].tolist():
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                break
            taken += 1
        self._taken = answer[:taken].copy()
        return taken == len(answer)


class FormCompiler:
    """Compiles forms, once each: xgrammar caches them. `config`: vLLM's, or the part that its xgrammar backend
    reads.
    """

    def __init__(self, config, tokenizer, vocabulary: int):
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        self._backend = XgrammarBackend(config, tokenizer, vocabulary)

    @classmethod
    def of_runner(cls, runner) -> "FormCompiler":
        """Makes the compiler of a model runner of vLLM."""
        from vllm.tokenizers import cached_tokenizer_from_config

        model = runner.vllm_config.model_config
        return cls(runner.vllm_config, cached_tokenizer_from_config(model), model.get_vocab_size())

    @classmethod
    def of_folder(cls, model: str) -> "FormCompiler":
        """Makes the compiler of a model's folder, without its engine."""
        from transformers import AutoConfig
        from vllm.tokenizers import get_tokenizer

        found = AutoConfig.from_pretrained(model, local_files_only=True)
        config = SimpleNamespace(
            structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
            model_config=SimpleNamespace(hf_config=found),
            speculative_config=None,
        )
        return cls(config, get_tokenizer(model), found.get_text_config().vocab_size)

    def start(self, form: dict, stops: list[int]) -> AnswerForm:
        """Returns the state of an empty answer. `form`: as `StructuredOutputs.model_dump` returns it; `stops`: token
        ids that may end the answer.
        """
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions
        from vllm.v1.structured_output.request import get_structured_output_key
        from vllm.v1.structured_output.utils import choice_as_grammar

        kind, text = get_structured_output_key(StructuredOutputsParams(**form))
        if kind is StructuredOutputOptions.CHOICE:
            kind, text = StructuredOutputOptions.GRAMMAR, choice_as_grammar(json.loads(text))
        grammar = self._backend.compile_grammar(kind, text, set(stops))
        return AnswerForm(grammar.matcher, self._backend.allocate_token_bitmask(1))
