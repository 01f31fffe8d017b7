"""The sampling parameters of a step's requests in columns, as the kernels take them. Called by the samplers."""

import numpy as np

# Rows of no request, or of one without our arguments, are vLLM's own warm-up: greedy, and never read.
WARM_UP = {"key": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "tolerance": 0.0, "forced": None}
COLUMNS = {
    "key": np.uint64,
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int32,
    "min_p": np.float32,
    "tolerance": np.float32,
}


def columns_of(args: list[dict]) -> dict[str, np.ndarray]:
    """Returns the sampling parameters of requests, an array [n] for each name in COLUMNS."""
    return {name: np.array([a[name] for a in args], kind) for name, kind in COLUMNS.items()}
