"""Figures of modes over seeds: means, and ratios to verl's shape of the same seed. Equal runs give equal bytes."""

from collections.abc import Mapping, Sequence

from tailrace.lab.simulated_training.modes import BASELINE

HEADS = ("mode", "s a step", "ratio", "rollout", "train", "weights", "waiting", "idle", "staleness", "max")
SHARES = ("rollout_share", "train_share", "weights_share", "waiting_share", "idle_share")


def training_summary(runs: Mapping[str, Sequence[dict]]) -> dict[str, dict]:
    """Returns by mode the mean of each figure over the seeds, and the maximum staleness. `ratio`: [mean, min, max] of
    the baseline's seconds a step over the mode's, seed by seed. Raises ValueError without the baseline.
    """
    if BASELINE not in runs:
        raise ValueError(f"{BASELINE}, the baseline, is not among {', '.join(runs)}")
    return {name: _of_mode(of_mode, runs[BASELINE]) for name, of_mode in runs.items()}


def _of_mode(runs: Sequence[dict], base: Sequence[dict]) -> dict:
    found = {key: _rounded(sum(run[key] for run in runs) / len(runs)) for key in runs[0]}
    ratios = [one["step_s"] / own["step_s"] for own, one in zip(runs, base, strict=True)]
    found["staleness_max"] = max(run["staleness_max"] for run in runs)
    found["ratio"] = [_rounded(value) for value in (sum(ratios) / len(ratios), min(ratios), max(ratios))]
    return found


def training_rows(modes: Mapping[str, dict]) -> list[tuple[str, ...]]:
    """Returns a row for each mode, with the columns of HEADS."""
    return [
        (
            name,
            f"{one['step_s']:.4g}",
            f"{one['ratio'][0]:.2f} ({one['ratio'][1]:.2f} to {one['ratio'][2]:.2f})",
            *(f"{100 * one[key]:.0f} %" for key in SHARES),
            f"{one['staleness_mean']:.2f}",
            str(one["staleness_max"]),
        )
        for name, one in modes.items()
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
