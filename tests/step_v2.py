"""Steps of vLLM's second model runner: V2 itself lays out a batch, calls the samplers and takes the tokens.

Only its model is not there: the logits of a row are given. On a machine without a GPU, see
lab/benchmarks/engine/second_runner.py.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch

from tests.step_runner import PROMPT

REQUESTS, LENGTH, DRAFTED = 6, 64, 3


class NoModel:
    """Stands for a part that V2 asks in a step and that has nothing to do with samplers."""

    num_new_sampled_tokens_per_step = 1

    def postprocess_state(self, *_args) -> None: ...


def runner_v2(module, vocab: int, device: str = "cpu"):
    """V2's runner before its first request, with a sampler of its own. `module`: of V2's runner."""
    runner, here = object.__new__(module.GPUModelRunner), torch.device(device)
    runner.__dict__ |= {
        "vllm_config": SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: vocab)),
        "model_config": SimpleNamespace(rswa_window=None),
        "device": here,
        "max_num_reqs": REQUESTS,
        "vocab_size": vocab,
        "decode_query_len": DRAFTED + 1,
        "num_speculative_steps": DRAFTED,
        "use_pp": False,
        "is_last_pp_rank": True,
        "supports_mm_inputs": False,
        "input_buffers": module.InputBuffers(REQUESTS, 256, here),
        "req_states": module.RequestState(REQUESTS, LENGTH, 256, DRAFTED, vocab, here),
        "model_state": NoModel(),
        "speculator": SimpleNamespace(draft_logits=None),
        "sampler": _own(),
        "rejection_sampler": None,
    }
    for name in ("adaptive_verification", "fast_prefill", "pcp_manager", "batch_sharder"):
        setattr(runner, name, None)
    return runner


def _own():
    """The part of vLLM's own sampler that V2 reads, and nothing else: it must not be asked for tokens."""
    penalties = SimpleNamespace(output_bin_counts=None)
    return SimpleNamespace(
        sampling_states=None,
        penalties_state=penalties,
        add_request=lambda number, params: None,
        apply_staged_writes=lambda: None,
    )


class Steps:
    """Steps of one runner with our samplers. `args`: of the requests r0, r1, ... , see `sampler.extra_args`."""

    def __init__(self, runner, args: list[dict], contexts: list[list[int]]):
        from vllm import SamplingParams

        from tailrace.deployments.vllm_exact.fused.sampler_v2 import SamplerV2

        self.runner, self.sampler = runner, SamplerV2(runner)
        runner.sampler, runner.rejection_sampler = self.sampler, self.sampler.verifier()
        self.watch = nullcontext  # around what our samplers do
        self._computed = dict.fromkeys(range(len(args)), 0)
        for i, (one, context) in enumerate(zip(args, contexts, strict=True)):
            runner.req_states.add_request(f"r{i}", PROMPT, context, 0, LENGTH - PROMPT)
            params = SamplingParams(temperature=0.0, extra_args={"tailrace": one}, stop_token_ids=[2])
            self.sampler.add_request(runner.req_states.req_id_to_index[f"r{i}"], params)
        runner.req_states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def step(self, scheduled: dict[int, int], drafts: dict[int, list[int]], logits_of) -> dict[int, list[int]]:
        """Runs a step of `scheduled` tokens by request, its draft among them. Returns the tokens that V2 keeps.

        `logits_of`: gives f32[V] for (request, position of the token to draw).
        """
        from vllm.v1.core.sched.output import SchedulerOutput

        runner = self.runner
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {f"r{i}": count for i, count in scheduled.items()}
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.scheduled_spec_decode_tokens = {f"r{i}": tokens for i, tokens in drafts.items() if tokens}
        with self.watch():
            self.sampler.take_drafts(output.scheduled_spec_decode_tokens)
        states = runner.req_states
        for i, computed in self._computed.items():
            states.num_computed_tokens_np[states.req_id_to_index[f"r{i}"]] = computed
        np.minimum(states.num_computed_tokens_np, states.prefill_len.np, out=states.num_computed_prefill_tokens)
        batch_state, _ = runner.gather_batch_req_state(output, False)
        batch = runner.prepare_inputs(output, batch_state, SimpleNamespace(num_tokens=0, num_reqs=None), 0)
        hidden = torch.zeros(batch.num_tokens, runner.vocab_size, device=runner.device)
        for at, index in enumerate(batch.logits_indices.tolist()):
            owner = int(np.searchsorted(batch.cu_num_logits_np, at, side="right")) - 1
            name = int(batch.req_ids[owner][1:])
            place = int(batch.positions[index]) + 1
            hidden[index] = logits_of(name, place)
        runner.model = SimpleNamespace(compute_logits=lambda rows: rows)
        with self.watch():
            found, sampled, rejected = runner.sample(hidden, batch, None)
        runner.postprocess_sampled(batch.idx_mapping, found.sampled_token_ids, sampled, rejected, batch.query_start_loc)
        for name, count, wrong in zip(batch.req_ids, batch.num_scheduled_tokens, rejected.tolist(), strict=True):
            self._computed[int(name[1:])] += int(count) - wrong
        kept = zip(batch.req_ids, found.sampled_token_ids.tolist(), sampled.tolist(), strict=True)
        return {int(name[1:]): tokens[:count] for name, tokens, count in kept}
