"""`tailrace bench sampler`: milliseconds per row of logits to draw a token, by the exact kernel and by plain torch.

One run measures all kinds in turn, so that a busy machine slows them alike. Each figure is the best of the rounds.
"""

import json
import time

ROUNDS = 7


def measure(rows: int = 16, vocab: int = 49152, threads: tuple[int, ...] = (1, 2)) -> dict:
    """Returns ms per row by kind, for `rows` rows of `vocab` normal logits (spread 3); torch's by number of threads.

    `race`: the argmax of softmax probabilities over exponential noise, as samplers without replayable noise draw.
    """
    import numpy as np
    import torch

    from tailrace.deployments.vllm_exact import kernel_cpu

    rng = np.random.default_rng(0)
    tensor = torch.from_numpy((3 * rng.standard_normal((rows, vocab))).astype(np.float32))

    def columns(top_p=1.0, top_k=0):
        keys, positions = rng.integers(0, 2**64, rows, np.uint64), np.arange(rows)
        one, zero, free = np.ones(rows, np.float32), np.zeros(rows, np.float32), np.full(rows, -1, np.int32)
        return (
            keys,
            positions,
            one,
            np.full(rows, top_p, np.float32),
            np.full(rows, top_k, np.int32),
            zero,
            free,
            np.full(rows, 1e-4, np.float32),
        )

    def race():
        p = tensor.softmax(dim=-1)
        return p.div_(torch.empty_like(p).exponential_()).argmax(dim=-1)

    plain, nucleus, best_of = columns(), columns(top_p=0.95), columns(top_k=50)
    cases = {
        "numba": (None, lambda: kernel_cpu.sample_rows(tensor, *plain)),
        "numba_top_p_0.95": (None, lambda: kernel_cpu.sample_rows(tensor, *nucleus)),
        "numba_top_k_50": (None, lambda: kernel_cpu.sample_rows(tensor, *best_of)),
    }
    for count in threads:
        cases[f"race_{count}_threads"] = (count, race)
    best_ms = dict.fromkeys(cases, float("inf"))
    before = torch.get_num_threads()
    for _ in range(ROUNDS + 1):  # the first round also compiles; the best one is reported
        for name, (count, run) in cases.items():
            torch.set_num_threads(count or before)
            start = time.perf_counter()
            run()
            best_ms[name] = min(best_ms[name], 1e3 * (time.perf_counter() - start) / rows)
    torch.set_num_threads(before)
    return {"rows": rows, "vocab": vocab, "ms_per_row": {name: round(ms, 4) for name, ms in best_ms.items()}}


if __name__ == "__main__":
    print(json.dumps(measure()))
