"""min_p, top_k and top_p as one number per row in torch, on any device: the floors of filters_cpu.py.

Invariant: masses are summed as the same integers, so a row's floor is that of the kernels that draw.
Called by kept_tokens.py.
"""

import torch

from tailrace.deployments.vllm_exact.gumbel_rng import MASS_UNITS


def _cut(ordered, units, target):
    """Returns f32[n, 1]: the smallest logit with fewer units strictly above it than target; rows of `ordered` fall."""
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    place = torch.arange(ordered.shape[1], device=ordered.device).expand_as(ordered)
    first = torch.where(starts, place, 0).cummax(dim=1).values  # of the run of equal logits
    above = (units.cumsum(dim=1) - units).gather(1, first)
    kept = (above < target).sum(dim=1, keepdim=True)
    return ordered.gather(1, (kept - 1).clamp(min=0))


def floors(logits, ordered, peak, temperature, top_p, top_k, min_p):
    """Returns f32[n, 1]: the smallest kept logit after min_p, top_k, top_p; -inf: all are kept. `ordered` falls."""
    bar = peak.double() + torch.log(min_p.double()) * temperature
    floor = bar.float()
    floor = torch.where(floor.double() < bar, torch.nextafter(floor, torch.full_like(floor, torch.inf)), floor)
    ones = ((ordered >= floor) & (ordered > -torch.inf)).long()
    limited = (top_k > 0) & (top_k < logits.shape[1]) & (ones.sum(dim=1, keepdim=True) > top_k)
    floor = torch.where(limited, torch.maximum(floor, _cut(ordered, ones, top_k)), floor)
    weights = torch.exp((ordered.double() - peak.double()) * (1.0 / temperature))
    units = torch.where(ordered >= floor, weights * MASS_UNITS, 0.0).long()
    target = torch.ceil(units.sum(dim=1, keepdim=True).double() * top_p.double()).long().clamp(min=1)
    return torch.where(top_p < 1.0, torch.maximum(floor, _cut(ordered, units, target)), floor)
