"""The certificate's figures on close calls: their number, the noise seen, tokens that it may flip, the cost of redraws.

Noise is measured on this machine: the logprobs of the same tokens in two runs, with other batches, chunks and drafts. A
distance between two candidates has the noise of two logits, so it moves sqrt(2) times as far as one logprob. Called by
tokens.py and by `tailrace verify`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.close_calls import density, expected_flips_per_million
from tailrace.deployments.messages.rollout import GroupResult

COUNTED = ("draws", "margins_below.", "redraw")
"""Beginnings of the names of an engine's counts, see `EngineStats.work`."""

OF_TWO = 2**0.5


async def work_of(client: RolloutClient) -> Counter[str]:
    """Returns the margins and redraws so far of all present replicas; each name is of one replica."""
    replicas = (await client.status()).replicas
    return Counter(
        {
            f"{one.replica_id} {key}": count
            for one in replicas
            for key, count in one.work.items()
            if key.startswith(COUNTED)
        }
    )


def total(work: Counter[str]) -> Counter[str]:
    """Returns the counts by their names alone, summed over replicas."""
    summed: Counter[str] = Counter()
    for name, count in work.items():
        summed[name.partition(" ")[2]] += count
    return summed


def noise_of(expected: list[GroupResult], got: list[GroupResult]) -> np.ndarray:
    """Returns f64[n]: how far the distance between two candidates moves, for each token that both rollouts share.

    By raw logprobs; results over HTTP have none, so they are left out.
    """
    theirs = {(group.prompt_id, sample.sample_index): sample for group in got for sample in group.samples}
    moved = [np.zeros(0)]
    for group in expected:
        for sample in group.samples:
            other = theirs.get((group.prompt_id, sample.sample_index))
            if other is not None and other.raw_logprobs:
                pairs = zip(sample.token_ids, other.token_ids, strict=False)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                same = min(len(sample.token_ids), len(other.token_ids)) if same is None else same
                moved.append(np.abs(np.subtract(sample.raw_logprobs[:same], other.raw_logprobs[:same])))
    return OF_TWO * np.concatenate(moved)


def close_calls_of(groups: list[GroupResult]) -> int:
    return sum(len(sample.close_calls) for group in groups for sample in group.samples)


def redraws_of(work: Counter[str]) -> dict:
    """Returns a run's redraws, those that changed a token, and their seconds, summed over replicas."""
    seconds = round(work["redraw_us"] / 1e6, 3)
    return {"redraws": work["redraws"], "redraws_changed": work["redraws_changed"], "redraw_seconds": seconds}


def flips(per_logit: float, noise: np.ndarray, tolerance: float) -> dict:
    """Returns the noise, and the expected flips per million tokens without and with redraws."""
    return {
        "noise": {
            "max": float(noise.max(initial=0.0)),
            "rms": float(np.sqrt(np.mean(noise**2))) if len(noise) else 0.0,
        },
        "expected_flips_per_million": {
            "without_redraws": expected_flips_per_million(per_logit, noise),
            "with_redraws": expected_flips_per_million(per_logit, noise, tolerance),
        },
    }


def sureness(
    groups: list[list[GroupResult]],
    work: Iterable[Counter[str]],
    tolerance: float,
    references: Sequence[list[GroupResult]] | None = None,
) -> dict:
    """Returns the figures of all runs together. `references`: of each run's noise; by default the first run is that of
    all.
    """
    counts: Counter[str] = sum(work, Counter())
    pairs = zip(references or [groups[0]] * len(groups), groups, strict=True)
    moved = [noise_of(expected, got) for expected, got in pairs if got is not expected]
    noise = np.concatenate([np.zeros(0), *moved])
    tokens = sum(len(sample.token_ids) for run in groups for group in run for sample in group.samples)
    close, per_logit = sum(map(close_calls_of, groups)), density(counts)
    return {
        "tolerance": tolerance,
        "close_calls": close,
        "close_calls_per_million": 1e6 * close / max(1, tokens),
        "draws_per_logit": per_logit,
        **flips(per_logit, noise, tolerance),
        **redraws_of(counts),
    }


def sentences(result: dict) -> list[str]:
    """Returns the figures of `sureness` as sentences."""
    flipped, noise = result["expected_flips_per_million"], result["noise"]
    lines = (
        [
            f"{result['flips']} samples part, of {result['compared_tokens']} tokens compared: "
            f"{result['flips_per_million']:.0f} flips per million"
        ]
        if result.get("flips")
        else []
    )
    lines += [
        f"noise of a distance between two candidates: at most {noise['max']:.1e}, rms {noise['rms']:.1e}; "
        f"tolerance {result['tolerance']:.1e}",
        f"close calls: {result['close_calls']}, {result['close_calls_per_million']:.0f} per million tokens",
        f"expected flips per million tokens: {flipped['without_redraws']:.2g} without redraws, "
        f"{flipped['with_redraws']:.2g} with them",
    ]
    if result["redraws"]:
        each = result["redraw_seconds"] / result["redraws"]
        lines.append(
            f"{result['redraws']} redraws took {result['redraw_seconds']:.1f} s, {each:.3f} s each, "
            f"and changed {result['redraws_changed']} tokens"
        )
    return lines
