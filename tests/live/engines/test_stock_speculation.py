"""Why the samplers are replaced: speculative sampling, vLLM's own and ours, under one chi-square test.

At temperature 0.5 vLLM 0.32 on the CPU fails it. Its `_expand_kernel_impl` hands the C++ kernel an int64 copy of the
float output, so the temperatures of the draft rows are never written and those rows are divided by whatever the
memory held. When this test stops failing for vLLM, the note in its name and in the documentation can go.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_kernel

from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact import kernel_cpu
from tailrace.deployments.vllm_exact.patches import make_llvmlite_scannable
from tailrace.deployments.vllm_exact.sampler import ExactRejectionSampler, ExactSampler, extra_args
from tests.deployments.test_exact_distribution import TARGET, VOCAB, distribution, p_value

pytestmark = pytest.mark.live

REQUESTS, TEMPERATURE, POSITION = 4000, 0.5, 9
LOGITS = torch.from_numpy(TARGET[0, 0])
DRAFTS = [[int(np.argmax(TARGET[0, 0])), 5], [1], [], [5, 1, 7]]  # of request i: entry i modulo 4


def metadata_of(drafts):
    """vLLM's metadata of these drafts, rows laid out as its model runner does: per request its drafts, then bonus."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    ends = np.cumsum([len(d) + 1 for d in drafts])
    rows = np.arange(ends[-1])
    metadata.bonus_logits_indices = torch.from_numpy(ends - 1)
    metadata.target_logits_indices = torch.from_numpy(np.setdiff1d(rows, ends - 1))
    return metadata


def sampling_metadata(count, temperature):
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.zeros(count)
    return SamplingMetadata(
        temperature=torch.full((count,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(count)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def chunk(i, **sampling):
    tokens, given = np.zeros(POSITION, np.int32), {"temperature": TEMPERATURE, **sampling}
    key = int(np.random.default_rng(i).integers(0, 2**64, dtype=np.uint64))
    return ChunkRequest(f"r{i}", key, tokens, POSITION, 8, SamplingParams(**given), 0)


def runner_of(chunks):
    """The state of a model runner that the samplers read: its batch and its requests."""
    ids = [c.chunk_id for c in chunks]
    positions = np.array([len(c.token_ids) for c in chunks], np.int32)
    states = {
        c.chunk_id: SimpleNamespace(
            req_id=c.chunk_id, sampling_params=SimpleNamespace(extra_args={"tailrace": extra_args(c, 2)})
        )
        for c in chunks
    }
    batch = SimpleNamespace(req_ids=ids, num_reqs=len(ids), num_tokens_no_spec=positions)
    return SimpleNamespace(input_batch=batch, requests=states)


def all_drafts():
    return [DRAFTS[i % len(DRAFTS)] for i in range(REQUESTS)]


def p_values(output):
    """Of the first token of every request, apart for each kind of draft: all have the same logits."""
    first = output.sampled_token_ids[:, 0].numpy()
    p = distribution(TARGET[0, 0], temperature=TEMPERATURE)
    return [p_value(first[i :: len(DRAFTS)], p) for i in range(len(DRAFTS))]


@pytest.mark.parametrize("kernel", [kernel_cpu, torch_kernel])
def test_exact_speculation_has_the_targets_distribution(kernel):
    runner = runner_of([chunk(i) for i in range(REQUESTS)])
    logits = LOGITS.repeat(sum(len(d) + 1 for d in all_drafts()), 1)
    sampler = ExactSampler(runner, kernel)
    drafted = ExactRejectionSampler(sampler)(metadata_of(all_drafts()), None, logits, None)
    assert min(p_values(drafted)) > 1e-3
    plain = sampler(logits=logits[:REQUESTS], sampling_metadata=None)
    assert torch.equal(plain.sampled_token_ids[:, 0], drafted.sampled_token_ids[:, 0])


def stock_p_values():
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    make_llvmlite_scannable()
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    logits = LOGITS.repeat(sum(len(d) + 1 for d in all_drafts()), 1)
    stock = RejectionSampler(Sampler())
    return p_values(stock(metadata_of(all_drafts()), None, logits, sampling_metadata(REQUESTS, TEMPERATURE)))


def test_stock_speculation_on_the_cpu_has_not(monkeypatch):
    """Memory that nobody writes has 3 here: it may have the right temperatures, of a tensor that was there before."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **of: empty(self, *size, **of).fill_(3))
    values = stock_p_values()
    assert values[2] > 1e-3  # without drafts it is right: the harness is not what fails
    assert max(values[:2] + values[3:]) < 1e-6


def test_stock_speculation_fails_by_its_unwritten_temperatures(monkeypatch):
    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        return x.repeat_interleave(torch.diff(cu_num_tokens, prepend=torch.zeros(1, dtype=cu_num_tokens.dtype)))

    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", expand)
    assert min(stock_p_values()) > 1e-3


def test_a_step_leaves_records_of_what_it_emitted_and_warm_up_leaves_none():
    chunks = [chunk(0), chunk(1, temperature=0.0), chunk(2)]
    runner = runner_of(chunks)
    sampler = ExactSampler(runner, kernel_cpu)
    verifier = ExactRejectionSampler(sampler)
    best = int(LOGITS.argmax())
    drafts = [[], [best, best, (best + 1) % VOCAB], [5]]
    logits = LOGITS.repeat(7, 1)
    emitted = verifier(metadata_of(drafts), None, logits, None).sampled_token_ids
    assert emitted.dtype == torch.int32
    assert emitted[1].tolist() == [best, best, best, -1]
    raw = torch.log_softmax(LOGITS, 0)
    logprobs, raw_logprobs, _, drafted, accepted, *_ = sampler.records.take("r1", POSITION, 3)
    assert logprobs.tolist() == [0.0, 0.0, 0.0]
    assert raw_logprobs == pytest.approx(raw[best].repeat(3).numpy(), abs=1e-5)
    assert (drafted, accepted) == (3, 2)

    held, runner.input_batch = runner.input_batch, SimpleNamespace(req_ids=[], num_reqs=0, num_tokens_no_spec=None)
    assert sampler(logits=logits, sampling_metadata=None).sampled_token_ids.shape == (7, 1)
    verifier(metadata_of([[0]] * 3), None, logits[:6], None)
    runner.input_batch = held
    assert len(sampler.records) == 2


def test_a_replayed_sample_emits_its_list_then_end_of_sequence():
    base = chunk(0)
    replay = ChunkRequest("r0", 5, base.token_ids, POSITION - 1, 8, base.sampling, 0, forced=np.array([3, 4], np.int32))
    sampler = ExactSampler(runner_of([replay, chunk(1)]), kernel_cpu)
    drafts = [[4, 2, 2], []]
    emitted = ExactRejectionSampler(sampler)(metadata_of(drafts), None, LOGITS.repeat(5, 1), None).sampled_token_ids
    assert emitted[0].tolist() == [4, 2, 2, 2]  # its prompt has 8 tokens, so position 9 is place 1 of the list
    assert emitted[1, 1:].tolist() == [-1, -1, -1]
    logprobs = sampler.records.take("r0", POSITION, 4)[0]
    assert logprobs == pytest.approx(torch.log_softmax(LOGITS / TEMPERATURE, 0)[[4, 2, 2, 2]].numpy(), abs=1e-5)
