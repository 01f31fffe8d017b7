"""`tailrace bench sampler --triton`: the fused kernel of GPUs, interpreted, against the kernel of CPUs.

Both kernels draw rows of every kind. Then the benchmark counts the bytes that one row of a real vocabulary moves, as
the interpreter loads and stores them. The physical minimum is each logit once, and the 16 bytes of results.
"""

import numpy as np

ROWS_AT_ONCE = 40
VOCABULARIES = 1, 2, 5, 63, 64, 65, 200, 513, 1000, 1025, 1500, 2500
LARGE, SELDOM = 20_000, 50  # two programs per row in the first launch; once in SELDOM turns, with fewer rows
COUNTED = {"SmolLM2": 49_152, "Qwen2.5": 151_936}
TOLERANCES = 0.0, 2e-4, 0.02


def some_columns(rng, vocab: int, count: int) -> dict:
    """Returns columns for `kernel_cpu.sample_rows`: filters alone and together, forced tokens, tolerances."""
    filters = {
        "top_p": (np.float32, [1.0] * 3 + [1e-6, 0.05, 0.5, 0.9, 0.95, 0.999, 0.99995]),
        "top_k": (np.int32, [0] * 4 + [1, 2, 10, 50, 300, vocab - 1, vocab, 2 * vocab]),
        "min_p": (np.float32, [0.0] * 4 + [1e-9, 1e-4, 0.02, 0.5, 1.0]),
    }
    return {
        "keys": rng.integers(0, 2**64, count, np.uint64),
        "positions": rng.integers(0, 2**31, count),
        "temperature": rng.choice([0.0, 1e-6, 1e-5, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.7, 5.0, 100.0], count).astype(
            np.float32
        ),
        **{name: rng.choice(values, count).astype(kind) for name, (kind, values) in filters.items()},
        "forced": np.where(rng.random(count) < 0.1, rng.integers(0, vocab, count), -1).astype(np.int32),
        "tolerance": rng.choice(TOLERANCES, count).astype(np.float32),
    }


def some_logits(rng, vocab: int, count: int, dtype):
    """Returns a tensor [count, vocab] of `dtype`: flat and peaked rows, ties, -inf, a few with inf or NaN."""
    import torch

    x = rng.standard_normal((count, vocab)) * rng.choice([0.0, 0.3, 1.0, 3.0, 10.0, 30.0], (count, 1))
    x = x + rng.choice([0.0, 0.0, 20.0, -300.0], (count, 1))
    x[::3] = np.round(x[::3] * 2) / 2
    x[rng.random(x.shape) < rng.choice([0.0, 0.0, 0.3, 0.95], (count, 1))] = -np.inf
    x[np.arange(count), rng.integers(0, vocab, count)] = 0.5
    for bad in (np.inf, np.nan, -np.nan, -np.inf):
        x[rng.integers(count), rng.integers(0, vocab, 3)] = bad
    x[rng.integers(count)] = -np.inf
    return torch.from_numpy(x.astype(np.float32)).to(dtype)


def differences(kernel, logits, columns: dict) -> dict:
    """Returns the differences between the fused kernel and kernel_cpu.py: numbers of different tokens, NaN or inf, and
    close calls; the largest differences of logprobs and margins.
    """
    from tailrace.deployments.vllm_exact import kernel_cpu

    with np.errstate(all="ignore"):  # numpy warns of infinities and NaN, which are meant here
        cpu, fused = kernel_cpu.sample_rows(logits.float().numpy(), **columns), kernel.sample_rows(logits, **columns)
        return _differences(cpu, fused, columns, logits.shape[1])


def _differences(cpu, fused, columns: dict, vocab: int) -> dict:
    finite = [np.isfinite(a) & np.isfinite(b) for a, b in zip(cpu[1:], fused[1:], strict=True)]
    kinds = sum(int((np.isnan(a) != np.isnan(b)).sum()) for a, b in zip(cpu[1:3], fused[1:3], strict=True))
    kinds += sum(int((np.isinf(a) != np.isinf(b)).sum()) for a, b in zip(cpu[1:3], fused[1:3], strict=True))
    bound = columns["tolerance"]
    near = finite[2] & ((cpu[3] < bound) | (fused[3] < bound) | _open(columns, vocab))
    return {
        "tokens_differ": int((cpu[0] != fused[0]).sum()),
        "not_numbers_differ": kinds,
        "close_calls_differ": int(((cpu[3] < bound) != (fused[3] < bound)).sum()),
        "logprob_diff": max(_most(a - b, at) for a, b, at in zip(cpu[1:3], fused[1:3], finite, strict=False)),
        "margin_diff": _most((cpu[3] - fused[3]) / np.maximum(1.0, columns["temperature"]), near),
    }


def _open(columns: dict, vocab: int):
    """Returns bool[n]: whether a row has no filters. The margin of such a row is measured in the whole window, not only
    below the tolerance.
    """
    limited = (columns["top_k"] > 0) & (columns["top_k"] < vocab)
    return ~((columns["top_p"] < 1) | (columns["min_p"] > 0) | limited)


def _most(distances, where) -> float:
    return float(np.abs(distances[where]).max(initial=0.0))


def measure(rows: int = 20_000, seed: int = 0, say=lambda text: None) -> dict:
    """Returns the differences over at least `rows` rows, and the result of `traffic`."""
    import torch

    from tailrace.lab.benchmarks.engine.interpreted import interpreted

    kernel, torch_threads = interpreted(), torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict = {"cases": 0, "seed": seed}
    dtypes = torch.float32, torch.bfloat16, torch.float16
    turn = -1
    while found["cases"] < rows:
        turn += 1
        rng = np.random.default_rng((seed, turn))
        vocab, dtype = VOCABULARIES[turn % len(VOCABULARIES)], dtypes[turn // 2 % len(dtypes)]
        vocab, count = (LARGE, ROWS_AT_ONCE // 5) if turn % SELDOM == SELDOM - 1 else (vocab, ROWS_AT_ONCE)
        logits, columns = some_logits(rng, vocab, count, dtype), some_columns(rng, vocab, count)
        for name, value in differences(kernel, logits, columns).items():
            found[name] = max(found.get(name, 0), value) if name.endswith("diff") else found.get(name, 0) + value
        found["cases"] += count
        if turn % 25 == 24:
            say(f"{found}")
    torch.set_num_threads(torch_threads)
    return found | traffic(kernel)


def traffic(kernel) -> dict:
    """Returns, by vocabulary and filters, the bytes that a row of float32 logits moves, these as a multiple of the
    minimum, and the bytes of the candidates' buffer that are loaded again.
    """
    kinds = {
        "open": {},
        "top_p_0.95": {"top_p": 0.95},
        "top_k_50": {"top_k": 50},
        "min_p_0.05": {"min_p": 0.05},
        "all": {"top_p": 0.95, "top_k": 50, "min_p": 0.05},
    }
    found: dict = {"bytes_per_row": {}, "bytes_over_minimum": {}, "bytes_again_on_chip": {}}
    for model, vocab in COUNTED.items():
        for kind, filters in kinds.items():
            moved, again = moved_bytes(kernel, like_a_model(vocab), **filters)
            name = f"{model}_{kind}"
            found["bytes_per_row"][name], found["bytes_again_on_chip"][name] = moved, again
            found["bytes_over_minimum"][name] = round(moved / (4 * vocab + 16), 3)
    return found


def like_a_model(vocab: int):
    """Returns f32[1, vocab]: logits that fall by 1.5 for each e-fold of rank, roughly as those of language models."""
    import torch

    rng = np.random.default_rng(1)
    x = -1.5 * np.log(1.0 + np.arange(vocab)) + 0.3 * rng.standard_normal(vocab)
    return torch.from_numpy(rng.permutation(x).astype(np.float32)[None])


def moved_bytes(kernel, logits, **filters) -> tuple[int, int]:
    """Returns two numbers of bytes: those that the draw of one row moves, and those of the candidates' buffer that the
    draw loads again.
    """
    from tailrace.lab.benchmarks.engine.interpreted import counted

    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "forced": -1, "tolerance": 2e-4} | filters
    kinds = dict.fromkeys(usual, np.float32) | {"top_k": np.int32, "forced": np.int32}
    columns = {name: np.full(1, value, kinds[name]) for name, value in usual.items()}
    with counted(logits) as bytes_of, np.errstate(all="ignore"):
        kernel.sample_rows(logits, np.array([7], np.uint64), np.array([3]), **columns)
    return bytes_of.logits + bytes_of.moved, bytes_of.on_chip
