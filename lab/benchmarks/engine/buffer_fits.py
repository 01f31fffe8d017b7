"""How often the candidates of top_p fit in the fused kernel's buffer:
python -m tailrace.lab.benchmarks.engine.buffer_fits.

The logits are those of the demo model on texts of this repository. The bound is computed in float64 as scan.py and
candidates.py compute it; no kernel runs. Prints two figures by temperature and top_p. One is the share of rows whose
candidates do not fit, or whose bound fails its test: the kernel reads such a row several times. The other is the bytes
that the other rows move, as a multiple of the minimum: median and maximum.
"""

import json
from pathlib import Path

import numpy as np

TEXTS = "README.md", "docs/driver.md", "policies/core/rollout.py"
TOKENS = 100
TOLERANCE = 2e-4


def logits_of_texts() -> np.ndarray:
    """Returns f32[n, V]: the demo model's logits after each of the first tokens of each text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tailrace.app.model import resolve_model

    torch.set_num_threads(1)
    folder = str(resolve_model("demo"))
    model, encode = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [(Path(__file__).parents[3] / name).read_text() for name in TEXTS]
    ids = [encode(text, return_tensors="pt").input_ids[:, :TOKENS] for text in texts]
    with torch.no_grad():
        return np.concatenate([model(each).logits[0].float().numpy() for each in ids])


def bytes_over_minimum(logits: np.ndarray, heat: float, top_p: float) -> float | None:
    """Returns the bytes that a row f64[V] moves as a multiple of the minimum, or None if its candidates do not fit or
    its bound fails the test.
    """
    from tailrace.deployments.vllm_exact.fused import kernel, parameters, scan

    bins, span, vocab = scan.BINS.value, kernel.SPAN, len(logits)
    per_logit, peak = parameters.BINS_PER_T / max(heat, 0.5), logits.max()
    found = np.zeros(bins)
    for part in np.split(logits, range(span, vocab, span)):
        head = part[: kernel.BLOCK].max() + scan.HEADROOM.value / per_logit
        own = np.clip((head - part) * per_logit, 0, bins - 1).astype(int) + int(np.floor((peak - head) * per_logit))
        found += np.bincount(own[(own >= 0) & (own < bins)], minlength=bins)
    weights = np.exp((logits - peak) / heat)
    wide, mass = min(top_p + TOLERANCE / heat, 1.0), weights.sum()
    below = (found * np.exp(-np.arange(bins) / per_logit / heat))[::-1].cumsum()[::-1]
    bounds = np.flatnonzero(below <= (1 - wide) * 0.99 * mass)
    if not bounds.size:
        return None
    theta = peak - (bounds[0] + 1) / per_logit - 2 * TOLERANCE
    count, enough = (logits >= theta).sum(), weights[logits > theta + 2 * TOLERANCE].sum() >= wide * mass
    if not enough or count > max(kernel.LEAST_ROOM, vocab // kernel.ROOM):
        return None
    counts = 2 * 4 * bins * -(-vocab // span)
    return (2 * 4 * vocab + 2 * 8 * count + counts) / (4 * vocab + 16)


def measure() -> dict:
    rows, found = logits_of_texts().astype(np.float64), {"rows": TOKENS * len(TEXTS)}
    for heat in (0.7, 1.0):
        for top_p in (0.9, 0.95, 0.99, 0.999):
            over = [bytes_over_minimum(row, heat, top_p) for row in rows]
            fit = [each for each in over if each is not None]
            share = round(1 - len(fit) / len(over), 3)
            most = {"median": round(float(np.median(fit)), 3), "max": round(max(fit), 3)} if fit else {}
            found[f"temperature {heat}, top_p {top_p}"] = {"do_not_fit": share} | most
    return found


if __name__ == "__main__":
    print(json.dumps(measure()))
