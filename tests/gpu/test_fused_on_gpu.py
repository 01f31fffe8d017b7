"""On the first GPU: the compiled kernel against kernel_cpu.py and torch's, its bytes' time, and steps without a wait.

Each test says what it will show. None has run yet: there was no GPU where they were written.
"""

import time

import numpy as np
import pytest
import test_kernels
import torch
import torch_kernel

from tailrace.deployments.vllm_exact import kernel_cpu
from tailrace.lab.benchmarks.engine import sampler_triton
from tests.step_runner import chunk, metadata_of, runner_of

pytestmark = pytest.mark.gpu
LIKE = ("tokens_differ", "not_numbers_differ", "close_calls_differ")
ROUNDS = 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 63, 1000, 20_000, 49_152, 151_936])
def test_tokens_are_those_of_the_cpu(fused, vocab, dtype):
    """Shows that what holds under the interpreter holds for machine code, on real vocabularies too."""
    for seed in range(8):
        rng, count = np.random.default_rng((vocab, seed)), 64
        logits, columns = (
            sampler_triton.some_logits(rng, vocab, count, dtype),
            sampler_triton.some_columns(rng, vocab, count),
        )
        on_gpu = _OnGpu(fused)
        found = sampler_triton.differences(on_gpu, logits, columns)
        assert [found[name] for name in LIKE] == [0, 0, 0]
        assert found["logprob_diff"] < 1e-5 and found["margin_diff"] < 1e-5


class _OnGpu:
    """The kernel with its logits moved to the GPU first."""

    def __init__(self, kernel):
        self._kernel = kernel

    def sample_rows(self, logits, **columns):
        return self._kernel.sample_rows(logits.cuda(), **columns)


def test_tokens_are_those_of_torch_in_large_batches(fused):
    """Shows 10,000 rows of a real vocabulary in batches of 500, as models make them."""
    row = sampler_triton.like_a_model(49_152)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = (row + 0.5 * torch.from_numpy(rng.standard_normal((500, 49_152)).astype(np.float32))).cuda()
        columns = sampler_triton.some_columns(rng, 49_152, 500)
        tokens = fused.sample_rows(logits, **columns)[0]
        assert (tokens == torch_kernel.sample_rows(logits, **columns)[0]).all()


def test_a_row_is_the_same_bits_in_every_batch(fused):
    """Shows batch invariance of tokens, logprobs and margins on the GPU."""
    rng = np.random.default_rng(4)
    logits = sampler_triton.some_logits(rng, 49_152, 200, torch.bfloat16).cuda()
    columns = sampler_triton.some_columns(rng, 49_152, 200)
    together = fused.sample_rows(logits, **columns)
    for i in range(0, 200, 7):
        alone = fused.sample_rows(logits[i : i + 1], **{name: c[i : i + 1] for name, c in columns.items()})
        assert [a.tobytes() for a in alone] == [t[i : i + 1].tobytes() for t in together]


@pytest.mark.parametrize("drafts", [None, [[1, 2], [], [5], [7, 7, 7]]])
def test_a_step_waits_for_nothing(fused, drafts):
    """Shows that a step asks the device for nothing: torch raises on any wait of its own. The records come later."""
    from tailrace.deployments.vllm_exact.fused.device_sampler import DeviceSampler

    sampling = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}]
    chunks = [chunk(i, **each) for i, each in enumerate(sampling)]
    count = sum(len(d) + 1 for d in drafts or [[]] * 4)
    logits = torch.randn(count, 49_152, device="cuda", dtype=torch.bfloat16)
    sampler = DeviceSampler(runner_of(chunks, drafts, device="cuda", tolerance=0.1, stops=True))
    metadata = metadata_of(drafts, device="cuda") if drafts else None

    def step():
        if drafts:
            return sampler.verifier()(metadata, None, logits, None).sampled_token_ids
        return sampler(logits=logits, sampling_metadata=None).sampled_token_ids

    first = step().tolist()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again.tolist() == first
    starts = np.cumsum([0] + [len(d) + 1 for d in drafts or [[]] * 4])[:4]
    own = logits[torch.from_numpy(starts).cuda()].float().cpu().numpy()
    settings = [
        (c.sample_key, 9, c.sampling.temperature, c.sampling.top_p, c.sampling.top_k, 0.0, -1, 0.1) for c in chunks
    ]
    kinds = test_kernels.KINDS.values()
    columns = [np.array(column, kind) for column, kind in zip(zip(*settings, strict=True), kinds, strict=True)]
    assert [row[0] for row in first] == kernel_cpu.sample_rows(own, *columns)[0].tolist()
    assert np.isfinite(sampler.records.take("r0", 9, 1).logprobs).all()


@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_time_of_a_row(fused, vocab, rows):
    """Prints microseconds a row, the share of the card's bandwidth, and the time of softmax and multinomial."""
    from tailrace.deployments.vllm_exact.fused.parameters import parameters_of, to_device

    logits = sampler_triton.like_a_model(vocab).cuda().repeat(rows, 1).contiguous()
    device, none = logits.device, np.full(rows, -1, np.int32)
    keys, places = to_device(np.arange(rows), device), to_device(np.arange(rows), device)

    def parameters(top_p, top_k):
        columns = np.ones(rows, np.float32), np.full(rows, top_p, np.float32), np.full(rows, top_k, np.int32)
        return parameters_of(vocab, *columns, np.zeros(rows, np.float32), none, np.full(rows, 2e-4, np.float32)).to(
            device
        )

    kinds = {"open": parameters(1.0, 0), "top_p 0.95": parameters(0.95, 0), "top_k 50": parameters(1.0, 50)}
    cases = {kind: (lambda given=given: fused.draw(logits, keys, places, given)) for kind, given in kinds.items()}
    cases["softmax and multinomial"] = lambda: torch.multinomial(logits.softmax(-1), 1)
    for name, run in cases.items():
        seconds = min(_seconds(run) for _ in range(ROUNDS))
        print(f"{rows} rows of {vocab}, {name}: {1e6 * seconds / rows:.2f} us a row, "
              f"{4 * vocab * rows / seconds / 1e9:.0f} GB/s of logits")  # fmt: skip


def _seconds(run) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start
