"""The samplers of GPUs emit the tokens and keep the records of those of CPUs, with the kernel interpreted.

vLLM's types need vLLM, and so this is a live test; no engine runs.
"""

import numpy as np
import pytest
import torch

from tailrace.deployments.vllm_exact import kernel_cpu
from tailrace.deployments.vllm_exact.sampler import ExactSampler, cut_at, verify
from tailrace.lab.benchmarks.engine import interpreted
from tests.step_runner import PROMPT, chunk, metadata_of, runner_of

VOCAB = 40
SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "min_p": 0.05},
]
LOGITS = torch.from_numpy(np.random.default_rng(2).standard_normal((30, VOCAB)).astype(np.float32))


@pytest.fixture(scope="module")
def device_sampler():
    interpreted.interpreted()
    from tailrace.deployments.vllm_exact.fused import device_sampler

    yield device_sampler
    interpreted.forget()


def chunks():
    return [chunk(i, **sampling) for i, sampling in enumerate(SAMPLING)]


def record_of(sampler, i, count):
    return sampler.records.take(f"r{i}", PROMPT, count)


def same(one, other):
    assert one[3:] == other[3:]
    for a, b in zip(one[:3], other[:3], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_plain_step(device_sampler):
    cpu, ours = ExactSampler(runner_of(chunks()), kernel_cpu), device_sampler.DeviceSampler(runner_of(chunks()))
    outputs = [each(logits=LOGITS[:5].clone(), sampling_metadata=None).sampled_token_ids for each in (cpu, ours)]
    assert outputs[0].tolist() == outputs[1].tolist() and outputs[1].dtype == torch.int32
    for i in range(5):
        same(record_of(cpu, i, 1), record_of(ours, i, 1))


def test_a_step_with_drafts_and_close_calls_that_end_it(device_sampler):
    drawn = ExactSampler(runner_of(chunks()), kernel_cpu)(logits=LOGITS[[0, 3, 7, 8, 9]], sampling_metadata=None)
    good = drawn.sampled_token_ids[:, 0].tolist()
    drafts = [[good[0], 3], [5, 5, 5], [], [good[3]], [good[4], 1]]
    for tolerance, stops in ((0.0, False), (0.3, True)):
        made = [runner_of(chunks(), drafts, tolerance=tolerance, stops=stops) for _ in range(2)]
        cpu, ours = ExactSampler(made[0], kernel_cpu), device_sampler.DeviceSampler(made[1])
        outputs = [
            each.verifier()(metadata_of(drafts), None, LOGITS[:13].clone(), None).sampled_token_ids
            for each in (cpu, ours)
        ]
        assert outputs[0].tolist() == outputs[1].tolist()
        assert cpu.take_closed() == ours.take_closed()
        counts = (outputs[0] >= 0).sum(1).tolist()
        assert stops or max(counts) > 1
        for i, count in enumerate(counts):
            same(record_of(cpu, i, count), record_of(ours, i, count))


def test_replays_emit_their_lists(device_sampler):
    replays = [chunk(0, forced=np.array([3, 4], np.int32), temperature=1.0), chunk(1, temperature=1.0)]
    drafts = [[3, 4, 2], [7]]
    sampler = device_sampler.DeviceSampler(runner_of(replays, drafts))
    emitted = sampler.verifier()(metadata_of(drafts), None, LOGITS[:6], None).sampled_token_ids
    assert emitted[0].tolist() == [3, 4, 2, 2]  # then end of sequence, again and again
    assert np.isinf(record_of(sampler, 0, 4).margins).all()


def test_a_row_inside_its_prompt_leaves_no_record(device_sampler):
    runner = runner_of(chunks(), inside=(1, 3))
    sampler = device_sampler.DeviceSampler(runner)
    sampler(logits=LOGITS[:5], sampling_metadata=None)
    assert [np.isnan(record_of(sampler, i, 1).logprobs[0]) for i in range(5)] == [False, True, False, True, False]


def test_a_row_inside_its_prompt_in_a_step_with_drafts(device_sampler):
    drafts = [[], [3, 5], []]
    sampler = device_sampler.DeviceSampler(runner_of(chunks()[:3], drafts, inside=(0,)))
    emitted = sampler.verifier()(metadata_of(drafts), None, LOGITS[:5], None).sampled_token_ids
    assert emitted.shape == (3, 3)
    for i, count in ((1, int((emitted[1] >= 0).sum())), (2, 1)):
        assert np.isfinite(record_of(sampler, i, count).logprobs).all()
    assert np.isnan(record_of(sampler, 0, 1).logprobs[0])


def test_a_context_that_is_computed_again_in_parts_keeps_the_record_of_its_first_token(device_sampler):
    """Beside another's drafts, after a preemption: a row of it replaced the logprobs of that token."""
    drafts, held = [[], [3, 5]], chunks()[:2]
    runner = runner_of(held, drafts)
    sampler, alone = (device_sampler.DeviceSampler(one) for one in (runner, runner_of(held, drafts)))
    for each in (sampler, alone):
        each.verifier()(metadata_of(drafts), None, LOGITS[:4].clone(), None)
    runner.positions = runner_of(held, drafts, inside=(0,)).positions
    sampler.verifier()(metadata_of(drafts), None, LOGITS[4:8].clone(), None)
    same(record_of(alone, 0, 1), record_of(sampler, 0, 1))


def test_a_step_does_not_read_what_it_has_drawn(device_sampler):
    """Nothing is noted before records or close calls are asked for, unless it has arrived anyway."""
    sampler = device_sampler.DeviceSampler(runner_of(chunks(), tolerance=0.5, stops=True))
    sampler(logits=LOGITS[:5], sampling_metadata=None)
    assert len(sampler._later) == 1 and not sampler._closed
    assert sampler.take_closed() and not sampler._later


def test_warm_up_leaves_nothing(device_sampler):
    sampler = device_sampler.DeviceSampler(runner_of(chunks()))
    assert sampler(logits=LOGITS[:3], sampling_metadata=None).sampled_token_ids.shape == (3, 1)
    sampler.verifier()(metadata_of([[0]] * 3), None, LOGITS[:6], None)
    assert len(sampler.records) == 0


def test_verification_on_the_device_is_that_of_the_host(device_sampler):
    rng = np.random.default_rng(3)
    for _ in range(50):
        counts = rng.integers(0, 5, 7)
        rows, drafted = device_sampler.places_of(counts)
        drawn, drafts = rng.integers(0, 3, (counts + 1).sum()).astype(np.int32), rng.integers(0, 3, counts.sum() + 1)
        drafts = np.where(drafted >= 0, drafts[drafted], -1).astype(np.int32)
        close = rng.random(rows.shape) < 0.1
        want = cut_at(verify(drawn[rows], drafts, counts)[0], close)[0]
        got = device_sampler.emitted(*(torch.from_numpy(each) for each in (drawn[rows], drafts, close)))
        assert got.tolist() == want.tolist()


def test_a_token_that_arrives_after_its_request_has_ended_leaves_no_record(device_sampler, monkeypatch):
    """A step that ran ahead has drawn for it. Its row of records is another request's by then."""
    arrived = []
    monkeypatch.setattr(device_sampler.HostCopy, "arrived", property(lambda copy: bool(arrived)))
    runner = runner_of(chunks()[:2])
    sampler = device_sampler.DeviceSampler(runner)

    def draw(rows):
        return sampler(logits=LOGITS[rows].clone(), sampling_metadata=None)

    draw([0, 1])
    arrived.append(True)
    sampler.settle()
    arrived.clear()
    runner.positions = runner.positions + 1
    draw([2, 3])  # ahead
    wanted = sampler.records.take("r0", PROMPT, 1)
    other = runner_of([chunk(7)])
    runner.requests |= other.requests
    runner.input_batch, runner.positions, runner.query_start_loc = (
        other.input_batch, other.positions, other.query_start_loc,
    )  # fmt: skip
    draw([4])
    arrived.append(True)
    assert np.isfinite(wanted.logprobs).all()
    taken = sampler.records.take("r7", PROMPT, 2)
    assert np.isfinite(taken.logprobs[0]) and np.isnan(taken.logprobs[1])
    assert np.isfinite(sampler.records.take("r1", PROMPT, 2).logprobs).all()


def test_drafts_that_arrive_after_their_request_has_ended_leave_no_record(device_sampler, monkeypatch):
    drawn = ExactSampler(runner_of(chunks()[:2]), kernel_cpu)(logits=LOGITS[[0, 2]], sampling_metadata=None)
    drafts = drawn.sampled_token_ids.tolist()  # right ones: each request gets two tokens
    arrived = []
    monkeypatch.setattr(device_sampler.HostCopy, "arrived", property(lambda copy: bool(arrived)))
    runner = runner_of(chunks()[:2], drafts)
    sampler = device_sampler.DeviceSampler(runner)
    sampler.verifier()(metadata_of(drafts), None, LOGITS[:4].clone(), None)
    sampler.records.take("r0", PROMPT, 0)
    other = runner_of([chunk(7)])
    runner.requests |= other.requests
    for name in ("input_batch", "positions", "query_start_loc"):
        setattr(runner, name, getattr(other, name))
    sampler(logits=LOGITS[[4]].clone(), sampling_metadata=None)
    arrived.append(True)
    taken = sampler.records.take("r7", PROMPT, 2)
    assert np.isfinite(taken.logprobs[0]) and np.isnan(taken.logprobs[1]) and not taken.drafted
    mine = sampler.records.take("r1", PROMPT, 2)
    assert np.isfinite(mine.logprobs).all() and (mine.drafted, mine.accepted) == (1, 1)


def test_steps_of_one_batch_are_recorded_together(device_sampler):
    """In order, and once they are as many as STEPS_TOGETHER even if nothing asks for their records."""
    runner = runner_of(chunks())
    sampler, alone = device_sampler.DeviceSampler(runner), ExactSampler(runner_of(chunks()), kernel_cpu)
    wanted = []
    for step in range(device_sampler.STEPS_TOGETHER):
        assert len(sampler._later) == step
        sampler(logits=LOGITS[step % 3 : step % 3 + 5].clone(), sampling_metadata=None)
        drawn = alone(logits=LOGITS[step % 3 : step % 3 + 5].clone(), sampling_metadata=None)
        wanted.append(drawn.sampled_token_ids[:, 0].tolist())
        for each in (runner, alone._runner):
            each.positions = each.positions + 1
            each.input_batch.num_tokens_no_spec = each.input_batch.num_tokens_no_spec + 1
    assert not sampler._later
    for i in range(5):
        same(record_of(alone, i, len(wanted)), record_of(sampler, i, len(wanted)))
