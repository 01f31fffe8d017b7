"""Changes of logits that requests specify: bans, biases, penalties and forms of answers.

Invariant: a row's change is a function of the request and of the tokens before the row, drafts included; a row after a
draft that its request cannot emit is never used. Order and formulas: vLLM 0.32, `v1/sample/sampler.py` and
`model_executor/layers/utils.py: apply_penalties`. Called by sampler.py; runs on the device of the logits.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch

from tailrace.deployments.constraints.answer_forms import AnswerForm, FormCompiler
from tailrace.deployments.messages.sampling import SamplingParams


def rule_args(sampling: SamplingParams, bad_words: list[list[int]]) -> dict | None:
    """Returns plain values, which may cross processes, or None if no logit changes. `bad_words`: in token ids."""
    if not sampling.changes_logits:
        return None
    form = sampling.structured_outputs
    return {
        "bad_words": bad_words,
        "allowed": None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
        "bias": [list(pair) for pair in sampling.logit_bias],
        "min_tokens": sampling.min_tokens,
        "repetition": sampling.repetition_penalty,
        "presence": sampling.presence_penalty,
        "frequency": sampling.frequency_penalty,
        "form": None if form is None else form.model_dump(mode="json", exclude_none=True),
    }


@dataclass(slots=True)
class LogitRules:
    """The rules of one request. `stops`: token ids that end it. `form`: the state of its answer's form, or None."""

    args: dict
    prompt_tokens: int
    stops: list[int]
    form: AnswerForm | None = None
    _allowed: torch.Tensor | None = field(init=False)
    _banned: torch.Tensor = field(init=False)  # bad words of one token
    _phrases: list[list[int]] = field(init=False)  # longer ones

    def __post_init__(self):
        allowed, words = self.args["allowed"], self.args["bad_words"]
        self._allowed = None if allowed is None else torch.tensor(allowed)
        self._banned = torch.tensor([word[0] for word in words if len(word) == 1], dtype=torch.long)
        self._phrases = [word for word in words if len(word) > 1]

    def apply(self, row: torch.Tensor, context: np.ndarray) -> None:
        """Changes row f32[V] in place, the logits of the token after context (int32: prompt, answer, drafts)."""
        answer = context[self.prompt_tokens :]
        if self.form is not None:
            self.form.mask(row, answer)
        if self._allowed is not None:
            allowed = self._allowed.to(row.device)
            kept = row[allowed]
            row.fill_(-inf)
            row[allowed] = kept
        row[self._banned.to(row.device)] = -inf
        for *before, last in self._phrases:
            if answer[-len(before) :].tolist() == before:
                row[last] = -inf
        if len(answer) < self.args["min_tokens"]:
            row[self.stops] = -inf
        for token, bias in self.args["bias"]:
            row[token] += bias
        self._penalise(row, context, answer)

    def _penalise(self, row: torch.Tensor, context: np.ndarray, answer: np.ndarray) -> None:
        if (by := self.args["repetition"]) != 1.0:
            seen = torch.from_numpy(np.unique(context).astype(np.int64)).to(row.device)
            logits = row[seen]
            row[seen] = torch.where(logits > 0, logits / by, logits * by)
        if self.args["presence"] or self.args["frequency"]:
            tokens, counts = (torch.from_numpy(a.astype(np.int64)) for a in np.unique(answer, return_counts=True))
            row[tokens.to(row.device)] -= (self.args["frequency"] * counts + self.args["presence"]).to(row)


class RuleBook:
    """The rules of all requests that have some. `runner`: vLLM's model runner."""

    def __init__(self, runner):
        self._runner, self._compiler = runner, None
        self._kept: dict[str, tuple[object, LogitRules]] = {}  # by request id; the state, since ids may be used again

    def of(self, states: list, args: list[dict]) -> dict[int, LogitRules]:
        """Returns the rules of those requests of a batch that have some, by batch index; forgets all others."""
        kept, found = {}, {}
        for i, (state, one) in enumerate(zip(states, args, strict=True)):
            if one.get("rules") is not None:
                known = self._kept.get(state.req_id)
                if known is None or known[0] is not state:
                    known = state, self._made(state, one)
                kept[state.req_id], found[i] = known, known[1]
        self._kept = kept
        return found

    def _made(self, state, args: dict) -> LogitRules:
        rules, stops = args["rules"], sorted(state.sampling_params.all_stop_token_ids)
        form = None
        if rules["form"] is not None:
            self._compiler = self._compiler or FormCompiler.of_runner(self._runner)
            form = self._compiler.start(rules["form"], stops)
        return LogitRules(rules, args["prompt_tokens"], stops, form)
