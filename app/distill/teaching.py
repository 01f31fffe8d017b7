"""Training a smaller model on its target's distribution: forward KL at each place of an answer, AdamW, one CPU core.

The target's distribution at a place is its likeliest tokens and, as one outcome, all others: a lower bound of the
divergence that is kept in half a kilobyte, so a text that comes again costs no forward pass of the target. A step's
softmax runs over the tokens that are likely in it and some others, which represent the rest: a quarter of the time.
Invariant: embeddings and head are not touched. Called by drafter.py.
"""

import time
from collections.abc import Iterator
from math import cos, log, pi
from random import Random
from typing import NamedTuple

import torch

from tailrace.app.distill.acceptance import DistillAcceptance, acceptance
from tailrace.app.distill.texts import Text
from tailrace.app.errors import BadInput

LIKELIEST, OTHERS = 64, 2048
"""Numbers of tokens in a step: the target's likeliest at a place, and random ones of the rest."""

AGAIN = 3
"""Number of earlier texts repeated for each new one, which alone costs the target's forward pass, most of a step. With
one instead the demo's drafter came out alike: 0.335 of its drafts accepted after 390 steps.
"""

RATE, WARM_UP_STEPS, MOST_NORM = 1.5e-3, 20, 1.0
LOOK_PLACES, LOOKS = 200, 0.1
"""Number of held-out places per evaluation, and the share of the time spent on evaluations."""

TINY = 1e-6


class Hint(NamedTuple):
    """For each place of an answer: the target's likeliest tokens, int64[places, n], and their log probabilities."""

    tokens: torch.Tensor
    logs: torch.Tensor


class Said(NamedTuple):
    """After `steps` steps: the mean loss since the last evaluation, in nats; the held-out figures of the last
    evaluation.
    """

    steps: int
    done: float
    loss: float
    held_out: DistillAcceptance


class Teaching:
    """One target and one drafter, which stay on their devices. `temperature`: that of the rollouts."""

    def __init__(self, target, drafter, temperature: float, seed: int):
        self._target, self._drafter, self._temperature = target.eval().requires_grad_(False), drafter, temperature
        self._seed, self._chance = seed, torch.Generator().manual_seed(seed)
        self._head = _head(target)
        self._learned = _learned(drafter)
        self._hints: dict[Text, Hint] = {}

    def measure(self, texts: list[Text], places: int) -> DistillAcceptance:
        """Returns the figures over the first places of these texts, up to this number in all."""
        parts, left = [], places
        self._drafter.eval()
        with torch.no_grad():
            for number, text in enumerate(texts):
                cut = text._replace(tokens=text.tokens[: text.start + left])
                p, q = (self._logs(model, cut) for model in (self._target, self._drafter))
                parts.append((len(p), acceptance(p, q, self._seed + number)))
                left -= len(p)
                if not left:
                    break
        return DistillAcceptance.mean(parts)

    def teach(self, texts: list[Text], held_out: list[Text], steps: int, budget_s: float) -> Iterator[Said]:
        """Runs as it is read, a text a step; ends after `steps` steps or `budget_s` seconds."""
        optimiser = torch.optim.AdamW(self._learned, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        began_s, next_s, done, losses = time.monotonic(), 0.0, 0.0, []
        for step, text in enumerate(lessons(texts, self._seed)):
            for group in optimiser.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + cos(pi * done))
            losses.append(self._step(text, optimiser))
            spent_s = time.monotonic() - began_s
            done = min(1.0, max((step + 1) / steps, spent_s / budget_s))
            if spent_s >= next_s:
                held, losses = self.measure(held_out, LOOK_PLACES), losses[-1:]
                next_s = spent_s + (time.monotonic() - began_s - spent_s) / LOOKS
            yield Said(step + 1, done, sum(losses) / len(losses), held)
            if done == 1.0:
                return

    def _step(self, text: Text, optimiser) -> float:
        """Runs one step. Returns the mean loss of its places."""
        self._drafter.train()
        hint, tokens = self._hint(text), torch.tensor([text.tokens[:-1]])
        rows, offset, column = share(hint, len(self._head), OTHERS, self._chance)
        hidden = self._drafter.base_model(tokens, use_cache=False).last_hidden_state[0, text.start - 1 :]
        logits = hidden @ self._head[rows].T / self._temperature + offset
        loss = divergence(Hint(column[hint.tokens], hint.logs), logits).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._learned, MOST_NORM)
        optimiser.step()
        optimiser.zero_grad()
        return loss.item()

    def _hint(self, text: Text) -> Hint:
        if text not in self._hints:
            with torch.no_grad():
                logs, tokens = self._logs(self._target, text).topk(min(LIKELIEST, len(self._head)))
            self._hints[text] = Hint(tokens, logs)
        return self._hints[text]

    def _logs(self, model, text: Text) -> torch.Tensor:
        """Returns log probabilities f32[places, vocabulary] of each token of the answer."""
        tokens = torch.tensor([text.tokens[:-1]])
        kept = len(text.tokens) - text.start
        logits = model(tokens, use_cache=False, logits_to_keep=kept).logits[0]
        return (logits / self._temperature).log_softmax(1)


def lessons(texts: list[Text], seed: int) -> Iterator[Text]:
    """Yields each text, followed by AGAIN random earlier ones; earlier ones without end when all have been used."""
    chance, known = Random(seed), []
    for text in texts:
        known.append(text)
        yield text
        yield from chance.choices(known, k=AGAIN)
    while True:
        yield chance.choice(known)


def share(
    hint: Hint, size: int, others: int, chance: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (rows i64[n] of a head of `size` rows, offset f32[n] of their logits, column i64[size] of each row
    chosen).

    All tokens of the hint, and `others` drawn evenly, each of which counts for its share of all that are left.
    """
    named = hint.tokens.unique()
    left = torch.ones(size).index_fill_(0, named, 0.0)
    absent = size - len(named)
    drawn = left.multinomial(min(others, absent), generator=chance) if absent else named[:0]
    rows = torch.cat([named, drawn])
    offset = torch.zeros(len(rows))
    offset[len(named) :] = log(absent / len(drawn)) if absent else 0.0
    return rows, offset, torch.zeros(size, dtype=torch.long).index_copy_(0, rows, torch.arange(len(rows)))


def divergence(hint: Hint, logits: torch.Tensor) -> torch.Tensor:
    """Returns the forward KL divergence at each place, in nats, f32[places], with all tokens outside the hint as one
    outcome.
    """
    q = logits.gather(1, hint.tokens) - logits.logsumexp(1, keepdim=True)
    p = hint.logs.exp()
    rest, rest_q = ((1 - part.sum(1)).clamp(min=TINY) for part in (p, q.exp()))
    return (p * (hint.logs - q)).sum(1) + rest * (rest.log() - rest_q.log())


def _head(target) -> torch.Tensor:
    """Returns the head, f32[vocabulary, width], which maps the layers' output to logits. Raises BadInput if the head
    does more.
    """
    head, tokens = target.get_output_embeddings().weight, torch.arange(1, 5)[None]
    with torch.no_grad():
        hidden, logits = target.base_model(tokens).last_hidden_state, target(tokens).logits
    if not torch.allclose(hidden @ head.T, logits, rtol=1e-3, atol=1e-2):
        raise BadInput("--model: its logits are scaled, capped or shifted after its head, which is not supported")
    return head


def _learned(drafter) -> list:
    """Returns the parameters of its layers and of what follows them; embeddings and head stay the target's."""
    ends = (drafter.get_input_embeddings(), drafter.get_output_embeddings())
    fixed = {id(parameter) for end in ends for parameter in end.parameters()}
    for parameter in drafter.parameters():
        parameter.requires_grad_(id(parameter) not in fixed)
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]
