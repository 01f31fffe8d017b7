"""The tokens of a row that its filters keep (the support of the distribution that it is drawn from), and the logprobs
of the likeliest.

Invariant: the floor is that of the kernel that draws, to the bit, so a drawn token is among them; a token's logprob is
that of a draw of it, as `sample_rows` reports it. Called by sampler.py for the requests that need them.
"""

import numpy as np
import torch

from tailrace.deployments.vllm_exact.filters_torch import floors
from tailrace.deployments.vllm_exact.gumbel_rng import GREEDY_BELOW


def kept_tokens(logits: torch.Tensor, columns: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Returns for each row of logits f32[n, V], rules applied, the kept tokens by rising id; ties at the edge stay.

    `columns`: `temperature`, `top_p`, `top_k`, `min_p` of the rows, [n]. A greedy row keeps its draw alone.
    """
    greedy = columns["temperature"].astype(np.float64) < GREEDY_BELOW  # in float64, as in the kernels
    peaks = logits.argmax(dim=1)
    floor = _floors_cpu(logits, peaks, columns) if logits.device.type == "cpu" else _floors(logits, peaks, columns)
    kept = (logits >= floor[:, None]) & (logits > -torch.inf)
    rows, tokens = kept.nonzero(as_tuple=True)
    found = torch.split(tokens.cpu(), torch.bincount(rows.cpu(), minlength=len(logits)).tolist())
    draws = peaks.tolist()
    return [(draws[row],) if greedy[row] else tuple(one.tolist()) for row, one in enumerate(found)]


def _floors_cpu(logits: torch.Tensor, peaks: torch.Tensor, columns: dict[str, np.ndarray]) -> torch.Tensor:
    from tailrace.deployments.vllm_exact import filters_cpu  # numba is to be loaded after vLLM, and not on GPUs

    floor, filters = torch.empty(len(logits)), (columns[name] for name in ("temperature", "top_p", "top_k", "min_p"))
    filters_cpu.floors(np.ascontiguousarray(logits), peaks.numpy(), *filters, floor.numpy())
    return floor


def _floors(logits: torch.Tensor, peaks: torch.Tensor, columns: dict[str, np.ndarray]) -> torch.Tensor:
    heat, *filters = (
        torch.from_numpy(columns[name]).to(logits.device)[:, None]
        for name in ("temperature", "top_p", "top_k", "min_p")
    )
    ordered = logits.sort(dim=1, descending=True).values
    return floors(logits, ordered, logits.gather(1, peaks[:, None]), heat.double(), *filters)[:, 0]


def top_logprobs(logits: torch.Tensor, count: int, columns: dict[str, np.ndarray]) -> list[tuple]:
    """Returns for each row of logits f32[n, V], rules applied, its `count` likeliest tokens as (token, logprob).

    `columns`: `temperature`, `top_p`, `top_k`, `min_p` of the rows, [n]. A token that the filters drop has -inf. A
    greedy row has the logprobs of temperature 1.
    """
    names = ("temperature", "top_p", "top_k", "min_p")
    heat, top_p, top_k, min_p = (torch.from_numpy(columns[name]).to(logits.device)[:, None] for name in names)
    greedy = heat.double() < GREEDY_BELOW
    heat = torch.where(greedy, 1.0, heat).double()
    filters = torch.where(greedy, 1.0, top_p), torch.where(greedy, 0, top_k), torch.where(greedy, 0.0, min_p)
    ordered, tokens = logits.sort(dim=1, descending=True, stable=True)
    floor = floors(logits, ordered, ordered[:, :1], heat, *filters)
    kept = torch.where(ordered >= floor, ordered.double() / heat, -torch.inf)
    found = (kept - kept.logsumexp(dim=1, keepdim=True))[:, :count].float()
    rows = zip(tokens[:, :count].tolist(), found.tolist(), strict=True)
    return [tuple(zip(*row, strict=True)) for row in rows]


def end_dead_rows(states: list, key: str, owner: np.ndarray, drawn: tuple[np.ndarray, ...]) -> None:
    """Makes rows that keep no token emit one that ends their request, if it has one; their logprob NaN marks the cause.

    `states`: vLLM's states of the requests, with our arguments under `key`; `drawn`: see `sample_rows`.
    """
    if not states or not np.isnan(drawn[1].sum()):
        return
    for row in np.flatnonzero(np.isnan(drawn[1])).tolist():
        own = states[owner[row]].sampling_params
        eos = (own.extra_args or {}).get(key, {}).get("eos")
        ends = sorted(own.stop_token_ids or ()) if own.ignore_eos or eos is None else [eos]
        drawn[0][row] = ends[0] if ends else drawn[0][row]
