"""The samplers in vLLM's second model runner emit the tokens of kernel_cpu.py, over random parameters and drafts.

V2's own code lays out each step and takes its tokens, with its Triton kernels and ours interpreted; no engine runs.
"""

from functools import cache

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tailrace.deployments.constraints.logit_rules import LogitRules
from tailrace.deployments.vllm_exact import kernel_cpu
from tailrace.deployments.vllm_exact.replays import forced_token
from tailrace.deployments.vllm_exact.sampler import extra_args
from tailrace.deployments.vllm_exact.sampling_columns import COLUMNS
from tailrace.lab.benchmarks.engine.second_runner import second_runner
from tests.step_runner import PROMPT, chunk
from tests.step_v2 import DRAFTED, REQUESTS, Steps, runner_v2

VOCAB, ANSWER = 40, 14
EOS = 2
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2"}
"""Operations that wait for a GPU, by torch's names."""


@pytest.fixture(scope="module")
def module():
    with second_runner() as found:
        yield found


def some_args(rng, i: int, rules: bool) -> dict:
    sampling = {
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        "top_p": float(rng.choice([1.0, 0.4, 0.9])),
        "top_k": int(rng.choice([0, 0, 3, 20])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05])),
    }
    if rules:
        sampling |= {
            "repetition_penalty": float(rng.choice([1.0, 1.4])),
            "presence_penalty": float(rng.choice([0.0, 0.8])),
            "frequency_penalty": float(rng.choice([0.0, 0.5])),
            "logit_bias": ((5, 1.5),),
            "min_tokens": int(rng.choice([0, 6])),
        }
    forced = rng.integers(3, VOCAB, 6).astype(np.int32) if rng.random() < 0.15 else None
    made = chunk(int(rng.integers(1000)) + i, forced=forced, **sampling)
    return extra_args(made, EOS, tolerance=float(rng.choice([0.0, 2e-4, 0.2])), stops=bool(rng.random() < 0.4))


class Truth:
    """The answers of requests by kernel_cpu.py: `logits` f32[requests, positions, V] depend on the position alone."""

    def __init__(self, args: list[dict], contexts: list[list[int]], logits):
        self.args, self.logits = args, logits
        self.drawn: list[dict[int, tuple]] = []  # by request: position -> (token, logprob, raw logprob, margin)
        for i, (one, context) in enumerate(zip(args, contexts, strict=True)):
            rules = None if one["rules"] is None else LogitRules(one["rules"], one["prompt_tokens"], [EOS])
            tokens, found = list(context), {}
            for place in range(len(context), len(context) + ANSWER):
                found[place] = self._draw(i, place, rules, tokens)
                tokens.append(found[place][0])
            self.drawn.append(found)

    def _draw(self, i: int, place: int, rules, tokens: list[int]) -> tuple:
        one, row = self.args[i], self.logits[i, place].clone()
        if rules is not None:
            rules.apply(row, np.array(tokens, np.int32))
        columns = {name: np.array([one[name]], kind) for name, kind in COLUMNS.items()}
        forced = -1 if one["forced"] is None else forced_token(one, place)
        given = columns.pop("key"), np.array([place]), *columns.values()
        *filters, tolerance = given
        drawn = kernel_cpu.sample_rows(row[None].numpy(), *filters, np.array([forced], np.int32), tolerance)
        token, logprob, raw, margin = (column[0] for column in drawn)
        if rules is not None:
            raw = self.logits[i, place].log_softmax(-1)[int(token)].item()
        return int(token), float(logprob), float(raw), float(margin)

    def closes(self, i: int, place: int) -> bool:
        return self.args[i]["stops"] and self.drawn[i][place][3] < self.args[i]["tolerance"]


def some_draft(rng, truth: Truth, i: int, place: int) -> list[int]:
    """Returns a draft from `place`, right or wrong token by token."""
    right = [truth.drawn[i][at][0] for at in range(place, place + int(rng.integers(0, DRAFTED + 1)))]
    return [token if rng.random() < 0.8 else int(rng.integers(3, VOCAB)) for token in right]


def wanted(truth: Truth, i: int, place: int, draft: list[int]) -> list[int]:
    """Returns the tokens that a step from `place` emits: up to the first unlike its draft, or close."""
    made = []
    for at in range(place, place + len(draft) + 1):
        made.append(truth.drawn[i][at][0])
        if truth.closes(i, at) or at - place == len(draft) or draft[at - place] != made[-1]:
            return made
    raise AssertionError("a draft has a last token")


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_steps_emit_the_tokens_of_the_cpu(module, seed, rules):
    rng = np.random.default_rng((seed, rules))
    args = [some_args(rng, i, rules and i % 2 == 0) for i in range(REQUESTS)]
    contexts = [rng.integers(3, VOCAB, PROMPT + int(rng.integers(0, 4))).tolist() for _ in args]
    logits = torch.from_numpy(rng.standard_normal((REQUESTS, 64, VOCAB)).astype(np.float32) * 2)
    truth, steps = Truth(args, contexts, logits), Steps(runner_v2(module, VOCAB), args, contexts)
    answers: list[list[int]] = [[] for _ in args]
    left = [len(context) for context in contexts]  # of a request's context, not computed
    accepted = rejected = inside = 0
    for _ in range(9):
        scheduled, drafts = {}, {}
        for i, context in enumerate(contexts):
            if rng.random() < 0.25 or len(answers[i]) > ANSWER - 2 * DRAFTED:
                continue
            if left[i]:
                scheduled[i] = int(rng.integers(1, left[i] + 1))
            else:
                drafts[i] = some_draft(rng, truth, i, len(context) + len(answers[i]))
                scheduled[i] = 1 + len(drafts[i])
        if not scheduled:
            continue
        made = steps.step(scheduled, drafts, lambda i, place: logits[i, place])
        closed = steps.sampler.take_closed()
        for i, count in scheduled.items():
            left[i] -= min(left[i], count) if i not in drafts else 0
            if left[i]:
                assert made[i] == []  # a close call noted here ends no token: see `Redraws.settle`
                inside += 1
                continue
            place, draft = len(contexts[i]) + len(answers[i]), drafts.get(i, [])
            assert made[i] == wanted(truth, i, place, draft)
            last = place + len(made[i]) - 1
            assert closed.get(f"r{i}") == (last if truth.closes(i, last) else None)
            answers[i] += made[i]
            accepted, rejected = accepted + len(made[i]) - 1, rejected + len(draft) - len(made[i]) + 1
    assert inside and (accepted or not any(map(len, answers))) and rejected
    for i, answer in enumerate(answers):
        if not answer:
            continue
        record = steps.sampler.records.take(f"r{i}", len(contexts[i]), len(answer))
        expected = [truth.drawn[i][len(contexts[i]) + at] for at in range(len(answer))]
        assert answer == [token for token, *_ in expected]
        np.testing.assert_allclose(record.logprobs, [row[1] for row in expected], atol=1e-5)
        np.testing.assert_allclose(record.raw_logprobs, [row[2] for row in expected], atol=1e-5)
        bound = np.float32(args[i]["tolerance"])
        assert (record.margins < bound).tolist() == [np.float32(row[3]) < bound for row in expected]


class NoReads(TorchDispatchMode):
    """Raises where an operation would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in READS, func
        return func(*args, **(kwargs or {}))


@cache
def plain_args() -> tuple:
    return tuple(extra_args(chunk(i, temperature=1.0, top_p=0.9), EOS, tolerance=0.5, stops=True) for i in range(3))


@pytest.mark.parametrize("drafts", [{}, {0: [5, 6], 2: [7]}])
def test_a_step_does_not_read_what_it_has_drawn(module, drafts):
    """Nothing is noted before records or close calls are asked for, unless it has arrived anyway."""
    contexts = [[3] * PROMPT for _ in range(3)]
    steps = Steps(runner_v2(module, VOCAB), list(plain_args()), contexts)
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 64, VOCAB)).astype(np.float32))
    steps.step(dict.fromkeys(range(3), PROMPT), {}, lambda i, place: logits[i, place])
    steps.sampler.take_closed()
    steps.watch = NoReads
    steps.step({i: 1 + len(drafts.get(i, [])) for i in range(3)}, drafts, lambda i, place: logits[i, place])
    assert len(steps.sampler._later) == 1 and not steps.sampler._closed
    assert steps.sampler.take_closed() and not steps.sampler._later


def test_requests_of_vllm_itself_leave_nothing(module):
    """Its warm-up makes some, without Tailrace's arguments, and batches of no request at all."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch

    steps = Steps(runner_v2(module, VOCAB), [], [])
    runner, sampler = steps.runner, steps.sampler
    runner.req_states.add_request("_warmup_0_", 4, [1, 2, 3, 4], 0, 4)
    sampler.add_request(runner.req_states.req_id_to_index["_warmup_0_"], SamplingParams.for_sampler_warmup())
    batch = InputBatch.make_dummy(4, 8, runner.input_buffers)
    found = sampler(torch.zeros(4, VOCAB), batch)
    assert found.sampled_token_ids.shape == (4, 1) and found.num_sampled.tolist() == [1] * 4
    assert len(sampler.records) == 0


def test_a_number_that_is_used_again_is_another_request(module):
    steps = Steps(runner_v2(module, VOCAB), list(plain_args()[:1]), [[3] * PROMPT])
    states, view = steps.runner.req_states, steps.sampler._runner
    number = states.req_id_to_index["r0"]
    states.remove_request("r0")
    states.add_request("other", PROMPT, [4] * PROMPT, 0, 8)
    assert states.req_id_to_index["other"] == number
    steps.sampler.add_request(number, view.requests["r0"].sampling_params)
    assert list(view.requests) == ["other"]


def test_a_request_that_comes_back_under_another_number_stays(module):
    steps = Steps(runner_v2(module, VOCAB), list(plain_args()[:1]), [[3] * PROMPT])
    states, view, sampler = steps.runner.req_states, steps.sampler._runner, steps.sampler
    first, params = states.req_id_to_index["r0"], view.requests["r0"].sampling_params
    states.remove_request("r0")
    for name in ("r1", "r0"):
        states.free_indices.sort(key=lambda number: (number == first) == (name == "r1"))
        states.add_request(name, PROMPT, [4] * PROMPT, 0, 8)
        if name == "r0":
            sampler.add_request(states.req_id_to_index["r0"], params)
    assert states.req_id_to_index == {"r1": first, "r0": states.req_id_to_index["r0"]}
    sampler.add_request(first, params)
    assert sorted(view.requests) == ["r0", "r1"]


def test_runners_that_do_not_fit_are_refused(module):
    from tailrace.deployments.vllm_exact.fused.sampler_v2 import SamplerV2

    for name, value, reason in (("supports_mm_inputs", True, "images"), ("batch_sharder", object(), "part of each")):
        runner = runner_v2(module, VOCAB)
        setattr(runner, name, value)
        with pytest.raises(ValueError, match=f"model_runner v2 .*{reason}.*; take v1"):
            SamplerV2(runner)
