"""The exact samplers on a GPU: a step draws, verifies drafts and returns without waiting for the device.

Positions come from the model runner's tensors. Tokens, values, positions and drafts of a step are copied after its
work. They become records some steps later, together, at the latest on request: vLLM has then waited for the tokens. A
step that ran ahead may have drawn for a request that has ended; that leaves no record. Invariant: tokens and records
are those of sampler.py. A batch with rules for tokens, or with requests for likeliest tokens or masks, is drawn as
there, and waits. Called by worker.py on GPUs.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tailrace.deployments.vllm_exact.fused import kernel
from tailrace.deployments.vllm_exact.fused.parameters import RowParameters, parameters_of, to_device
from tailrace.deployments.vllm_exact.logprob_store import LogprobStore
from tailrace.deployments.vllm_exact.replays import forced_tokens
from tailrace.deployments.vllm_exact.sampler import NOTHING, ExactRejectionSampler, ExactSampler
from tailrace.deployments.vllm_exact.shared_noise import share_noise

STEPS_TOGETHER = 16
"""Number of steps whose records are made together, unless they are asked for: writing those of one step costs the host
as much as drawing its tokens.
"""


class HostCopy:
    """Tensors that are copied to the host, in the order of the device's work."""

    def __init__(self, *tensors: torch.Tensor):
        self._copies = [each.to("cpu", non_blocking=True) for each in tensors]
        self._arrived = torch.cuda.Event() if tensors[0].is_cuda else None
        if self._arrived:
            self._arrived.record()

    @property
    def arrived(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays, and waits for them."""
        if self._arrived:
            self._arrived.synchronize()
        return [each.numpy() for each in self._copies]


class Unrecorded(NamedTuple):
    """A step whose records are not made yet. `note` makes them from the copy's arrays. `batch`: that of a plain step;
    consecutive ones of one batch are noted together, their arrays joined. None: the step is noted alone.
    """

    copy: HostCopy
    note: Callable
    batch: object | None = None


class DeviceSampler(ExactSampler):
    """A replacement of vLLM's `Sampler` on a GPU."""

    TOKENS = torch.int32
    """Type of the tokens that the model runner takes."""

    def __init__(self, model_runner):
        super().__init__(model_runner, kernel)
        self._later: deque[Unrecorded] = deque()
        self._known: tuple | None = None  # (batch, vocabulary, keys, parameters) of the last plain step

    @property
    def records(self) -> LogprobStore:
        """The records of all tokens that vLLM has received; a step in flight is not waited for."""
        self.settle(only_arrived=True)
        return self._records

    def take_closed(self) -> dict[str, int]:
        self.settle(only_arrived=True)
        return super().take_closed()

    def verifier(self) -> "DeviceRejectionSampler":
        return DeviceRejectionSampler(self)

    def settle(self, only_arrived: bool = False) -> None:
        """Makes the records of finished steps, in order. `only_arrived`: does not wait for any."""
        while (step := self._next(only_arrived)) is not None:
            found = [step.copy.arrays()]
            while step.batch is not None and (more := self._next(only_arrived, step.batch)) is not None:
                found.append(more.copy.arrays())
            step.note(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))

    def _next(self, only_arrived: bool, batch=None) -> Unrecorded | None:
        """Returns the oldest step without records, no longer kept here, if it may be noted; `batch`: and is of it."""
        step = self._later[0] if self._later else None
        if step is None or (batch is not None and step.batch is not batch):
            return None
        return self._later.popleft() if not only_arrived or step.copy.arrived else None

    def still_open(self, batch) -> np.ndarray:
        """Returns bool[n]: which of the requests have not left their rows of records since the batch was made."""
        return self._records.taken(batch.slots) == batch.taken

    def opened_at(self, batch) -> np.ndarray:
        """Returns i64[n]: the position of the first token that was drawn for each request."""
        return self._records.opened_at(batch.slots)

    def must_wait(self, batch) -> bool:
        """Returns whether rows of the batch must be drawn on the host; then all records are made up to now."""
        waits = bool(batch.rules or batch.tops or batch.masks)
        if waits:
            self.settle()
        return waits

    def __call__(self, logits, sampling_metadata, **given):
        batch = self.batch(logits.shape[0])
        if batch.slots is None or self.must_wait(batch):
            return super().__call__(logits, sampling_metadata, **given)
        tokens, values, places = self.start(logits, batch, None, self.last_indexes(logits.shape[0]))
        self.leave(Unrecorded(HostCopy(values, places), partial(self._note_plain, batch), batch))
        return device_output(tokens[:, None])

    def last_indexes(self, count: int) -> torch.Tensor:
        """Returns i[n] on the device: where the last token of each request is among the step's tokens."""
        return self._runner.query_start_loc.gpu[1 : count + 1] - 1

    def _note_plain(self, batch, values: np.ndarray, places: np.ndarray) -> None:
        """Stores the records of steps without drafts: values f32[s n, 3], positions i64[s n], step by step."""
        rows = np.tile(np.arange(len(batch.states)), len(places) // len(batch.states))
        # A row inside a prompt is discarded by vLLM; its token has no place among the request's.
        kept = np.flatnonzero((places >= self.opened_at(batch)[rows]) & self.still_open(batch)[rows])
        self.note(batch, rows[kept], places[kept], values[kept].T, {})

    def share_noise(self, proposer) -> None:
        share_noise(proposer, self.draft)

    def draft(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The `Draft` of this sampler. No rules for tokens hold."""
        batch = self.batch(len(logits))
        if batch.slots is None or batch.replays:
            return logits.argmax(-1).int()
        keys, parameters = self._of(batch, None, logits)
        return kernel.draw(logits, keys, positions, parameters)[0]

    def start(self, logits, batch, owner: np.ndarray | None, indexes: torch.Tensor):
        """Returns (tokens [m], values f32[m, 3], positions i64[m]) of rows of logits, all on the device.

        Row r belongs to request owner[r] (None: to request r); its logits are those after token indexes[r] of the step.
        """
        places = self._runner.positions[indexes].long() + 1
        keys, parameters = self._of(batch, owner, logits)
        tokens, values = kernel.draw(logits, keys, places, parameters, self.TOKENS)
        return tokens, values, places

    def leave(self, step: Unrecorded) -> None:
        """Keeps a step, whose records are made once they are asked for, or with those of later steps."""
        self._later.append(step)
        if len(self._later) >= STEPS_TOGETHER:
            self.settle(only_arrived=True)

    def _of(self, batch, owner: np.ndarray | None, logits) -> tuple[torch.Tensor, RowParameters]:
        """Returns keys i64[m] and parameters of the rows on the device. Those of a step without drafts are reused by
        the next.
        """
        vocab, keeps = logits.shape[1], owner is None and not batch.replays
        if keeps and self._known and self._known[0] is batch and self._known[1] == vocab:
            return self._known[2:]
        owner = np.arange(len(batch.states)) if owner is None else owner
        columns = {name: values[owner] for name, values in batch.columns.items()}
        keys = to_device(columns.pop("key").view(np.int64), logits.device)
        forced = forced_tokens(batch.replays, owner, self._host_positions(owner))
        parameters = parameters_of(vocab, **columns, forced=forced).to(logits.device)
        if keeps:
            self._known = (batch, vocab, keys, parameters)
        return keys, parameters

    def _host_positions(self, owner: np.ndarray) -> np.ndarray:
        """Returns i64[m]: the positions of rows, from the host's own count; for replays."""
        held = self._runner.input_batch
        first = held.num_tokens_no_spec[: held.num_reqs].astype(np.int64)
        starts = np.searchsorted(owner, owner)
        return first[owner] + np.arange(len(owner)) - starts


class DeviceRejectionSampler(ExactRejectionSampler):
    """A replacement of vLLM's `RejectionSampler` on a GPU; shares requests and records with its DeviceSampler."""

    def __call__(self, metadata, draft_probs, logits, sampling_metadata):
        sampler, counts = self._sampler, np.asarray(metadata.num_draft_tokens, np.int64)
        batch = sampler.batch(len(counts))
        if batch.slots is None or sampler.must_wait(batch):
            return super().__call__(metadata, draft_probs, logits, sampling_metadata)
        rows, drafted = places_of(counts)
        owner = np.repeat(np.arange(len(counts)), counts + 1)
        tokens, values, places = sampler.start(logits, batch, owner, metadata.logits_indices)
        at = to_device(rows, logits.device)
        drafts = torch.nn.functional.pad(metadata.draft_token_ids.int(), (0, 1), value=NOTHING)
        drafts = drafts[to_device(drafted, logits.device)]
        close = None
        if batch.stops.any():
            bars = np.where(batch.stops, batch.columns["tolerance"], np.float32(0.0))
            close = values[:, 2][at] < to_device(bars, logits.device)[:, None]

        def note(tokens, values, places, drafts):
            # A row inside a prompt is discarded by vLLM; its token has no place among the request's.
            kept = sampler.still_open(batch)[owner] & (places >= sampler.opened_at(batch)[owner])
            tokens = np.where(kept, tokens, NOTHING)
            sampler.note_drafts(batch, places[rows[:, 0]], counts, rows, drafts, tokens, values.T, {})

        sampler.leave(Unrecorded(HostCopy(tokens, values, places, drafts), note))
        return device_output(emitted(tokens[at], drafts, close))


def places_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rows i64[n, w], drafts i64[n, w - 1]): where the row of token j is, and its draft among all; -1: none.

    counts i64[n]: drafts by request. vLLM lays the rows of a request, its drafts' and then the bonus token's, together.
    """
    column = np.arange(counts.max(initial=0) + 1)
    starts, first = np.cumsum(counts + 1) - counts - 1, np.cumsum(counts) - counts
    rows = np.where(column <= counts[:, None], starts[:, None] + column, NOTHING)
    return rows, np.where(column[:-1] < counts[:, None], first[:, None] + column[:-1], NOTHING)


def emitted(drawn: torch.Tensor, drafts: torch.Tensor, close: torch.Tensor | None) -> torch.Tensor:
    """Returns [n, w]: the draws [n, w] up to the first unlike its draft, or that is `close`; then -1.

    drafts i32[n, w - 1], -1 where there is none. The same as `verify` and `cut_at`, on the device.
    """
    ends = torch.ones_like(drawn, dtype=torch.bool)
    ends[:, :-1] = (drawn[:, :-1] != drafts) | (drafts == NOTHING)
    if close is not None:
        ends |= close
    before = ends.int().cumsum(1) - ends.int()
    return torch.where(before == 0, drawn, NOTHING)


def device_output(tokens: torch.Tensor):
    """Returns vLLM's SamplerOutput of tokens [n, w] that stay where they are."""
    from vllm.v1.outputs import SamplerOutput

    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
