"""Forms of answers (JSON schema, regular expression, choice, grammar) as masks of logits, by vLLM's xgrammar backend.

Owns the compiled grammars of a worker. Invariant: a mask depends on the form and on the answer's tokens alone.
An answer that the form does not allow, as a replayed one, is not masked any more.
"""

import json

import numpy as np
import torch

from tailrace.deployments.constraints.form_check import params


class AnswerForm:
    """State of one answer. `matcher`: xgrammar's GrammarMatcher at the answer's begin."""

    def __init__(self, matcher, bitmask: torch.Tensor):
        self._matcher, self._bitmask = matcher, bitmask
        self._taken = np.zeros(0, np.int32)  # tokens that the matcher has accepted

    def mask(self, row: torch.Tensor, answer: np.ndarray) -> None:
        """Sets to -inf, in row f32[V], the tokens that may not follow `answer`; none if it left the form or ended."""
        from xgrammar import apply_token_bitmask_inplace

        if self._follow(answer) and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._bitmask, 0)
            apply_token_bitmask_inplace(row.unsqueeze(0), self._bitmask.to(row.device))

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


class AnswerForms:
    """Compiles forms, once each: xgrammar keeps them. `runner`: vLLM's model runner."""

    def __init__(self, runner):
        self._runner, self._backend = runner, None

    def start(self, form: dict, stops: list[int]) -> AnswerForm:
        """Returns the state of an empty answer. `stops`: token ids that may end it."""
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions
        from vllm.v1.structured_output.request import get_structured_output_key
        from vllm.v1.structured_output.utils import choice_as_grammar

        kind, text = get_structured_output_key(params(form))
        if kind is StructuredOutputOptions.CHOICE:
            kind, text = StructuredOutputOptions.GRAMMAR, choice_as_grammar(json.loads(text))
        grammar = self._compiler().compile_grammar(kind, text, set(stops))
        return AnswerForm(grammar.matcher, self._backend.allocate_token_bitmask(1))

    def _compiler(self):
        if self._backend is None:
            from vllm.tokenizers import cached_tokenizer_from_config
            from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

            config = self._runner.vllm_config
            tokenizer = cached_tokenizer_from_config(config.model_config)
            self._backend = XgrammarBackend(config, tokenizer, config.model_config.get_vocab_size())
        return self._backend
