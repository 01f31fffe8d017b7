"""The exact samplers in vLLM's second model runner, V2 (0.32, `v1/worker/gpu`): they draw as device_sampler.py does.

V2 adds a request once, under a number that is free, and hands each step's requests and tensors to its sampler.
Here they get the form in which the first runner has them, so that all else is shared with it.
Invariant: tokens and records are those of sampler.py. vLLM's own sampler draws nothing; V2 reads its states.
Called by worker.py.
"""

from types import SimpleNamespace

import numpy as np
import torch

from tailrace.deployments.vllm_exact.fused.device_sampler import DeviceRejectionSampler, DeviceSampler
from tailrace.deployments.vllm_exact.fused.draft_noise import DraftNoise
from tailrace.deployments.vllm_exact.fused.parameters import to_device
from tailrace.deployments.vllm_exact.sampler import ARGS_KEY, NOTHING

NO_REQUESTS = -1
"""Number of requests in a warm-up of vLLM's: no batch has it, so its rows leave no records."""


class StepView:
    """A step of V2 as the samplers see the first runner. `runner`: V2's, its model loaded.

    Requests without Tailrace's arguments are vLLM's own, of its warm-up.
    """

    def __init__(self, runner):
        self.vllm_config, self._states = runner.vllm_config, runner.req_states
        self.requests: dict[str, SimpleNamespace] = {}
        self._at: dict[int, SimpleNamespace] = {}  # by V2's number
        self.input_batch = self.positions = self.logits_indices = None

    def add(self, number: int, params) -> None:
        """Adds a request, under a number that an earlier one may have had. `params`: its SamplingParams."""
        old = self._at.pop(number, None)
        if old is not None and self.requests.get(old.req_id) is old:  # else it is here again, under another number
            del self.requests[old.req_id]
        if ARGS_KEY in (params.extra_args or {}):
            state = SimpleNamespace(req_id=self._states.index_to_req_id[number], sampling_params=params)
            self.requests[state.req_id] = self._at[number] = state

    def take(self, step) -> None:
        """Sets the InputBatch that the following calls see."""
        ours = all(map(self.requests.__contains__, step.req_ids))
        self.positions, self.logits_indices = step.positions, step.logits_indices
        self.input_batch = _StepInput(self._states, step, step.num_reqs if ours else NO_REQUESTS)


class _StepInput:
    """What the samplers read of the first runner's InputBatch. Computed when it is read: most steps need their names
    alone.
    """

    def __init__(self, states, step, num_reqs: int):
        self._states, self._step = states, step
        self.num_reqs, self.req_ids = num_reqs, step.req_ids

    @property
    def num_tokens_no_spec(self) -> np.ndarray:
        step = self._step
        drafts = np.diff(step.cu_num_logits_np).astype(np.int64) - 1
        drawn = step.num_computed_tokens_np + step.num_scheduled_tokens - drafts  # after last tokens, without drafts
        return np.maximum(drawn, step.prefill_len_np)  # as in V1, of rows inside their prompt too

    @property
    def token_ids_cpu(self) -> "_Contexts":
        return _Contexts(self._states, self._step)


class _Contexts:
    """The tokens of a step's requests, drafts included, read from the device when rules for tokens need them."""

    def __init__(self, states, step):
        self._states, self._step = states, step

    def __getitem__(self, place: tuple[int, slice]) -> np.ndarray:
        row, wanted = int(place[0]), place[1]
        first, end = self._step.cu_num_logits_np[row : row + 2].tolist()
        own = self._states.all_token_ids.gpu[int(self._step.idx_mapping_np[row]), : wanted.stop].cpu().numpy().copy()
        drafts = self._step.input_ids[self._step.logits_indices[first + 1 : end]].cpu().numpy()
        known = int(self._step.num_computed_tokens_np[row] + self._step.num_scheduled_tokens[row]) - len(drafts)
        drafts = drafts[: max(0, wanted.stop - known)]
        own[known : known + len(drafts)] = drafts
        return own


class SamplerV2(DeviceSampler):
    """A replacement of V2's `Sampler`. Raises ValueError, one line, for a runner that it does not fit."""

    TOKENS = torch.int64

    def __init__(self, runner):
        if (reason := unfit(runner)) is not None:
            raise ValueError(f"engine.model_runner v2 {reason}; take v1")
        super().__init__(StepView(runner))
        self._states, self._own = runner.req_states, runner.sampler
        self._draft_noise: DraftNoise | None = None

    @property
    def sampling_states(self):
        return self._own.sampling_states

    @property
    def penalties_state(self):
        return self._own.penalties_state

    def add_request(self, number: int, params) -> None:
        """Adds a request. Called by V2."""
        self._own.add_request(number, params)
        self._runner.add(number, params)
        if self._draft_noise is not None and (args := (params.extra_args or {}).get(ARGS_KEY)) is not None:
            self._draft_noise.set(number, args)

    def share_noise(self, proposer) -> None:
        """Lets vLLM's own drafter draw with the noise of its requests, if it draws at all."""
        if hasattr(proposer, "sample_draft"):
            held = self._states
            self._draft_noise = DraftNoise(held.max_num_reqs, held.vocab_size, held.draft_tokens.device)
            self._draft_noise.share_with(proposer)

    def apply_staged_writes(self) -> None:
        self._own.apply_staged_writes()

    def take_drafts(self, drafts: dict[str, list[int]]) -> None:
        """Puts the scheduler's drafts for the next step, by request, where V2 looks for its speculator's.

        -1 marks those that V2 has itself. A request that is new to V2 has none in vLLM 0.32.
        """
        ours = {name: tokens for name, tokens in drafts.items() if min(tokens, default=NOTHING) > NOTHING}
        known = {self._states.req_id_to_index.get(name): tokens for name, tokens in ours.items()}
        known.pop(None, None)
        if not known:
            return
        held = self._states.draft_tokens
        rows = np.zeros((len(known), held.shape[1]), np.int64)
        for row, tokens in zip(rows, known.values(), strict=True):
            row[: len(tokens)] = tokens
        held[to_device(np.array(list(known)), held.device)] = to_device(rows, held.device)

    @staticmethod
    def propose_nothing(speculator) -> None:
        """Makes vLLM's n-gram speculator propose nothing: the scheduler's drafts replace its proposals."""
        speculator.propose = lambda input_batch, *_, **__: speculator.drafts[: input_batch.num_reqs]

    def verifier(self) -> "RejectionSamplerV2":
        return RejectionSamplerV2(self)

    def see(self, step) -> None:
        self._runner.take(step)

    def last_indexes(self, count: int) -> torch.Tensor:
        return self._runner.logits_indices

    def output(self, tokens: torch.Tensor, step):
        """Returns V2's SamplerOutput of tokens [n, w], -1 after the last one of a row."""
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        counts = get_num_sampled_and_rejected(
            # Not `ones` kept from before: V2 changes the tensor in place.
            step.seq_lens.new_ones(len(tokens)) if tokens.shape[1] == 1 else (tokens >= 0).sum(1, dtype=torch.int32),
            step.seq_lens,
            step.cu_num_logits,
            step.idx_mapping,
            self._states.prefill_len.gpu,
        )
        return SamplerOutput(tokens.to(self.TOKENS), None, None, *counts)

    def __call__(self, logits, input_batch):
        self.see(input_batch)
        return self.output(super().__call__(logits, None).sampled_token_ids, input_batch)


class RejectionSamplerV2(DeviceRejectionSampler):
    """A replacement of V2's `RejectionSampler`; shares requests and records with its SamplerV2."""

    enable_adaptive_verification = False  # read by vLLM's warm-up

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        self._sampler.see(input_batch)
        found = super().__call__(metadata_of(input_batch), draft_logits, logits, None)
        return self._sampler.output(found.sampled_token_ids, input_batch)


def metadata_of(step) -> SimpleNamespace:
    """Returns the fields of vLLM's SpecDecodeMetadata that the samplers read, from an InputBatch.

    A request's rows are together in both: those of its drafts, then that of the bonus token.
    """
    starts, ends = step.cu_num_logits_np[:-1].astype(np.int64), step.cu_num_logits_np[1:].astype(np.int64)
    rows = np.arange(ends[-1])
    drafted, targets = np.setdiff1d(rows, starts), np.setdiff1d(rows, ends - 1)
    device, counts = step.input_ids.device, ends - starts - 1
    return SimpleNamespace(
        num_draft_tokens=counts.tolist(),
        max_spec_len=int(counts.max(initial=0)),
        draft_token_ids=step.input_ids[step.logits_indices[to_device(drafted, device)]],
        logits_indices=step.logits_indices,
        target_logits_indices=torch.from_numpy(targets),
        bonus_logits_indices=torch.from_numpy(ends - 1),
    )


def unfit(runner) -> str | None:
    """Returns in a few words why the exact samplers cannot draw in this runner, or None if they can."""
    if runner.supports_mm_inputs:
        return "encodes the images of a step together, so their embeddings depend on the batch"
    return None if runner.batch_sharder is None else "samples a part of each batch on each rank"
