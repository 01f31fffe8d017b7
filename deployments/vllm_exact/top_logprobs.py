"""Logprobs of the likeliest tokens of a row, under the distribution that it is drawn from.

Invariant: a token's logprob is that of a draw of it, as `sample_rows` reports it. Called by sampler.py for the few
requests that ask for them.
"""

import numpy as np
import torch

from tailrace.deployments.vllm_exact.gumbel_rng import GREEDY_BELOW
from tailrace.deployments.vllm_exact.kernel_gpu import floors


def top_logprobs(logits: torch.Tensor, count: int, columns: dict[str, np.ndarray]) -> list[tuple]:
    """Returns for each row of logits f32[n, V], rules applied, its `count` likeliest tokens as (token, logprob).

    `columns`: `temperature`, `top_p`, `top_k`, `min_p` of the rows, [n]. A token that the filters drop has -inf. A
    greedy row has the logprobs of temperature 1.
    """
    names = ("temperature", "top_p", "top_k", "min_p")
    heat, top_p, top_k, min_p = (torch.from_numpy(columns[name]).to(logits.device)[:, None] for name in names)
    greedy = heat < GREEDY_BELOW
    heat = torch.where(greedy, 1.0, heat).double()
    filters = torch.where(greedy, 1.0, top_p), torch.where(greedy, 0, top_k), torch.where(greedy, 0.0, min_p)
    ordered, tokens = logits.sort(dim=1, descending=True, stable=True)
    floor = floors(logits, ordered, ordered[:, :1], heat, *filters)
    kept = torch.where(ordered >= floor, ordered.double() / heat, -torch.inf)
    found = (kept - kept.logsumexp(dim=1, keepdim=True))[:, :count].float()
    rows = zip(tokens[:, :count].tolist(), found.tolist(), strict=True)
    return [tuple(zip(*row, strict=True)) for row in rows]
