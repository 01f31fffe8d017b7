"""vLLM's own draft models draw with the noise of their requests' tokens, in its first model runner.

A draft is right if it is the token that the exact sampler draws. With the same noise for both, two distributions that
are alike give the same token; a draft model that takes its likeliest token misses every other one.
Source: `_sample_draft_tokens`, vLLM 0.32, `v1/spec_decode/llm_base_proposer.py`. Called by worker.py.
"""

from collections.abc import Callable

import numpy as np
import torch

from tailrace.deployments.vllm_exact.replays import forced_tokens

Draft = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns tokens i32[n] by a draft model's logits [n, V] for the requests of the step, at positions i64[n]."""


class SharedNoise:
    """Replaces the drawing of one proposer; others than vLLM's draft models, MTP and EAGLE are left as they are."""

    def __init__(self, proposer, draft: Draft):
        self._proposer, self._draft = proposer, draft
        self._positions: torch.Tensor | None = None  # i64[n]: of the tokens to draw next
        self._propose = proposer.propose
        proposer.propose, proposer._sample_draft_tokens = self.propose, self.sample

    def propose(self, *args, **given):
        """Replaces `propose`: the first draft of a request is two after its last token that is computed."""
        positions = given["common_attn_metadata"].seq_lens.long() + 1
        rejected = given.get("num_rejected_tokens_gpu")
        self._positions = positions if rejected is None else positions - rejected
        return self._propose(*args, **given)

    def sample(self, hidden_states: torch.Tensor, _metadata) -> tuple[torch.Tensor, None]:
        """Replaces `_sample_draft_tokens`. Returns tokens i64[n], and no probabilities, which nothing here reads."""
        logits = self._proposer.model.compute_logits(hidden_states)
        tokens = self._draft(logits, self._positions[: len(logits)])
        self._positions = self._positions + 1
        return tokens.long(), None


def share_noise(proposer, draft: Draft) -> None:
    """Lets a proposer of vLLM's draw by `draft`, if it is one that draws from logits token by token."""
    draws = hasattr(proposer, "_sample_draft_tokens") and not proposer.parallel_drafting
    if draws and not getattr(proposer, "use_heterogeneous_vocab", False):
        SharedNoise(proposer, draft)


def draft_on_host(sampler, sample_rows: Callable, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The `Draft` of a sampler whose kernel draws on the host. No rules for tokens hold."""
    batch = sampler.batch(len(logits))
    if batch.slots is None:
        return logits.argmax(-1).int()
    places, columns = positions.cpu().numpy(), dict(batch.columns)
    forced = forced_tokens(batch.replays, np.arange(len(places)), places)
    return torch.from_numpy(sample_rows(logits.float(), columns.pop("key"), places, **columns, forced=forced)[0])
