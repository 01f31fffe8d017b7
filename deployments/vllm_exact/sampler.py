"""Exact replacements of vLLM's two samplers: the token at (sample key, position) is drawn, and drafts only guess it.

Invariant: the token emitted at a position is `sample_rows` of that position's logits and nothing else.
Drafts are verified by equality with it
(drafter-invariant speculative decoding, Daliri, Musco, Suresh 2024, arXiv 2408.07978).
The engine's worker replaces the model runner's `sampler` and `rejection_sampler` with these.
The engine replica fills `SamplingParams.extra_args["tailrace"]` with `extra_args`.
It takes logprobs from `ExactSampler.records`.
"""

from dataclasses import dataclass
from functools import partial
from operator import is_

import numpy as np
import torch

from tailrace.deployments.constraints.logit_rules import LogitRules, RuleBook, rule_args
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.vllm_exact.kept_tokens import end_dead_rows, kept_tokens, top_logprobs
from tailrace.deployments.vllm_exact.logprob_store import LogprobStore
from tailrace.deployments.vllm_exact.replays import forced_tokens
from tailrace.deployments.vllm_exact.sampling_columns import WARM_UP, columns_of
from tailrace.deployments.vllm_exact.shared_noise import draft_on_host, share_noise

ARGS_KEY = "tailrace"
NOTHING = -1  # vLLM's mark for "no token was emitted here"


def extra_args(
    chunk: ChunkRequest, eos_token_id: int, tolerance: float = 0.0, stops: bool = False, bad_words: list | None = None
) -> dict:
    """Returns a chunk's `SamplingParams.extra_args["tailrace"]`: plain numbers and lists, which may cross processes.

    A draw with a margin below `tolerance` is a close call. `stops`: a step emits no token after one. `bad_words`: those
    of the sampling parameters, in token ids.
    """
    sampling = chunk.sampling
    stretch = max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)  # of noise in a logit
    return {
        "key": int(chunk.sample_key),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": min(sampling.top_k, np.iinfo(np.int32).max),  # above any vocabulary: no filter
        "min_p": sampling.min_p,
        "prompt_tokens": chunk.answer_start,
        "forced": None if chunk.forced is None else chunk.forced.tolist(),
        "eos": eos_token_id,
        "tolerance": tolerance * stretch,
        "stops": stops,
        "rules": rule_args(sampling, bad_words or []),
        "tops": sampling.top_logprobs,
        "mask": sampling.sampling_mask,
    }


def verify(drawn: np.ndarray, drafts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (emitted i32[n, w], accepted i64[n]): the draws up to and including the first unlike its draft.

    drawn i32[n, w], drafts i32[n, w - 1], of which counts[n] per row are real; positions without a token are -1.
    """
    column = np.arange(drawn.shape[1])
    agrees = (drawn[:, :-1] == drafts) & (column[:-1] < counts[:, None])
    accepted = np.logical_and.accumulate(agrees, axis=1).sum(axis=1)
    return np.where(column <= accepted[:, None], drawn, NOTHING).astype(np.int32), accepted


def cut_at(emitted: np.ndarray, close: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (emitted i32[n, w] up to and including each row's first close call, the rows that have one, its column).

    close bool[n, w]; only columns with a token count.
    """
    close = close & (emitted != NOTHING)
    rows, at = np.flatnonzero(close.any(axis=1)), close.argmax(axis=1)
    last = np.full(len(emitted), emitted.shape[1])
    last[rows] = at[rows]
    return np.where(np.arange(emitted.shape[1]) <= last[:, None], emitted, NOTHING).astype(np.int32), rows, at[rows]


@dataclass(slots=True)
class _Batch:
    """Parameters of the requests of one engine step, in batch order."""

    states: list
    columns: dict[str, np.ndarray]
    replays: dict[int, dict]  # batch index -> arguments
    slots: np.ndarray | None  # None: warm-up
    taken: np.ndarray | None  # i64[n]: see `LogprobStore.taken`, when the batch was made
    stops: np.ndarray  # bool[n]: whether a close call ends a request's step
    rules: dict[int, LogitRules]  # by batch index
    tops: dict[int, int]  # by batch index: the number of likeliest tokens to report
    masks: tuple[int, ...]  # batch indexes of requests that need the tokens that the filters keep


class ExactSampler:
    """A replacement of vLLM's `Sampler`. `kernel`: the module kernel_cpu, or fused.kernel."""

    logprobs_mode = "raw_logprobs"  # read by vLLM's warm-up

    def __init__(self, model_runner, kernel):
        self._runner = model_runner
        self._sample_rows = kernel.sample_rows
        self._batch: _Batch | None = None
        self._rule_book = RuleBook(model_runner)
        self._records = LogprobStore()
        self._closed: dict[str, int] = {}  # request -> position of the close call that ended its last step

    @property
    def records(self) -> LogprobStore:
        return self._records

    def verifier(self) -> "ExactRejectionSampler":
        """Returns the replacement of vLLM's `RejectionSampler` that shares this one's requests and records."""
        return ExactRejectionSampler(self)

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """Returns f32[m, V] of logits [m, V]. Called by vLLM, for logprobs of prompts."""
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor):
        """Returns vLLM's LogprobsTensors of the tokens [m] and of the likeliest ones. Called as `compute_logprobs` is.

        vLLM's own version compiles a kernel at its first call.
        """
        from vllm.v1.outputs import LogprobsTensors

        own = token_ids.long()[:, None]
        chosen = logprobs.gather(1, own)
        values, tokens = logprobs.topk(num_logprobs, dim=1)
        ranks = (logprobs >= chosen).sum(1, dtype=torch.int32)
        return LogprobsTensors(torch.cat([own, tokens], dim=1).int(), torch.cat([chosen, values], dim=1), ranks)

    def take_closed(self) -> dict[str, int]:
        """Returns, by request, the position of the close call that ended its step, for the steps since the last
        call.
        """
        closed, self._closed = self._closed, {}
        return closed

    def close(self, batch: _Batch, rows: np.ndarray, positions: np.ndarray) -> None:
        """Records that close calls ended the step of these requests (batch indexes), at these positions."""
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            self._closed[batch.states[row].req_id] = position

    def __call__(self, logits, sampling_metadata, **_):
        batch = self.batch(logits.shape[0])
        positions, owner = self.positions(batch), np.arange(logits.shape[0])
        drawn, more = self.draw(logits, batch, owner, positions)
        if batch.slots is not None:
            self.note(batch, owner, positions, drawn[1:], more)
        return output(drawn[0][:, None], logits.device)

    def share_noise(self, proposer) -> None:
        """Lets vLLM's own drafter draw with the noise of its requests."""
        share_noise(proposer, partial(draft_on_host, self, self._sample_rows))

    def note(self, batch: _Batch, rows: np.ndarray, positions: np.ndarray, values, more) -> None:
        """Stores the records of one token of each of these requests, and its close calls. `values`: values of the
        tokens.
        """
        self._records.write(batch.slots[rows], positions, *values)
        self._records.write_more(batch.slots[rows], positions, rows, more)
        if batch.stops.any():
            closed = np.flatnonzero(batch.stops[rows] & (values[2] < batch.columns["tolerance"][rows]))
            self.close(batch, rows[closed], positions[closed])

    def note_drafts(self, batch: _Batch, first, counts, rows, drafts, tokens, values, more) -> np.ndarray:
        """Stores the records of a step with drafts, and its close calls. Returns the tokens i32[n, w] that it emits.

        first i64[n]: positions of first tokens; counts, rows, drafts: see `layout`; tokens, values: those of rows of
        logits.
        """
        emitted, accepted = verify(tokens[rows], drafts, counts)
        if batch.slots is None:
            return emitted
        if batch.stops.any():
            close = (values[2][rows] < batch.columns["tolerance"][:, None]) & batch.stops[:, None]
            emitted, ended, at = cut_at(emitted, close)
            self.close(batch, ended, first[ended] + at)
        i, j = np.nonzero(emitted != NOTHING)
        values, drafted = [column[rows[i, j]] for column in values], np.where(j == 0, counts[i], 0)
        self._records.write(batch.slots[i], first[i] + j, *values, drafted, j < accepted[i])
        self._records.write_more(batch.slots[i], first[i] + j, rows[i, j], more)
        return emitted

    def batch(self, count: int) -> _Batch:
        """Returns the step's `count` requests."""
        held = self._runner.input_batch
        if held.num_reqs != count:
            nothing = np.zeros(count, bool)
            none = {"states": [], "replays": {}, "slots": None, "taken": None, "rules": {}, "tops": {}, "masks": ()}
            return _Batch(columns=columns_of([WARM_UP] * count), stops=nothing, **none)
        states = list(map(self._runner.requests.__getitem__, held.req_ids))
        known = self._batch
        # A batch is often unchanged for many steps. State objects are compared, because ids may be used again.
        if known and len(known.states) == count and all(map(is_, known.states, states)):
            return known
        args = [(state.sampling_params.extra_args or {}).get(ARGS_KEY, WARM_UP) for state in states]
        replays = {i: a for i, a in enumerate(args) if a["forced"] is not None}
        slots = self._records.slots(held.req_ids, held.num_tokens_no_spec[:count].astype(np.int64))
        stops = np.array([a.get("stops", False) for a in args], bool)
        rules = self._rule_book.of(states, args)
        tops = {i: a["tops"] for i, a in enumerate(args) if a.get("tops")}
        masks = tuple(i for i, a in enumerate(args) if a.get("mask"))
        more = {"stops": stops, "rules": rules, "tops": tops, "masks": masks, "taken": self._records.taken(slots)}
        self._batch = _Batch(states=states, columns=columns_of(args), replays=replays, slots=slots, **more)
        return self._batch

    def positions(self, batch: _Batch) -> np.ndarray:
        """Returns i64[n]: the absolute position of the next token of each request of the step; 0 in a warm-up."""
        count, held = len(batch.stops), self._runner.input_batch
        return np.zeros(count, np.int64) if batch.slots is None else held.num_tokens_no_spec[:count].astype(np.int64)

    def draw(self, logits, batch: _Batch, owner: np.ndarray, positions: np.ndarray):
        """Runs `sample_rows` on logits [m, V], where row r is `positions[r]` of the batch's request `owner[r]`.

        Returns its results, and the extras of requests that need them, see `LogprobStore.write_more`.
        """
        forced = forced_tokens(batch.replays, owner, positions)
        columns = {name: values[owner] for name, values in batch.columns.items()}
        logits, raw = logits.float(), None
        if batch.rules:
            rows = np.flatnonzero(np.isin(owner, list(batch.rules)))
            raw = logits[rows].clone()  # raw logprobs are the model's own
            held = self._runner.input_batch.token_ids_cpu  # with the drafts of this step
            for row in rows.tolist():
                batch.rules[owner[row]].apply(logits[row], held[owner[row], : positions[row]])
        drawn = self._sample_rows(logits, columns.pop("key"), positions, **columns, forced=forced)
        end_dead_rows(batch.states, ARGS_KEY, owner, drawn)
        more = self._more(logits, batch, owner, columns)
        if raw is not None:
            tokens = torch.from_numpy(drawn[0][rows].astype(np.int64)).to(raw.device)
            drawn[2][rows] = raw.log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu().numpy()
        return drawn, more

    def _more(self, logits, batch: _Batch, owner: np.ndarray, columns: dict) -> dict[str, dict[int, tuple]]:
        found = {}
        if wanted := batch.tops:
            rows = np.flatnonzero(np.isin(owner, list(wanted)))
            tops = top_logprobs(logits[rows], max(wanted.values()), _of_rows(columns, rows))
            found["tops"] = {row: top[: wanted[owner[row]]] for row, top in zip(rows.tolist(), tops, strict=True)}
        if batch.masks:
            rows = np.flatnonzero(np.isin(owner, batch.masks))
            masks = kept_tokens(logits[rows], _of_rows(columns, rows))
            found["masks"] = dict(zip(rows.tolist(), masks, strict=True))
        return found


class ExactRejectionSampler:
    """A replacement of vLLM's `RejectionSampler`; shares requests and records with its ExactSampler."""

    def __init__(self, sampler: ExactSampler):
        self._sampler = sampler

    def __call__(self, metadata, draft_probs, logits, sampling_metadata):
        counts = np.asarray(metadata.num_draft_tokens, np.int64)
        batch = self._sampler.batch(len(counts))
        first = self._sampler.positions(batch)
        rows, drafts = layout(metadata, counts)
        here = rows >= 0
        owner, offset = np.zeros((2, logits.shape[0]), np.int64)
        owner[rows[here]], offset[rows[here]] = np.nonzero(here)
        (tokens, *values), more = self._sampler.draw(logits, batch, owner, first[owner] + offset)
        emitted = self._sampler.note_drafts(batch, first, counts, rows, drafts, tokens, values, more)
        return output(emitted, logits.device)


def layout(metadata, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rows i64[n, w], drafts i32[n, w - 1]): the logits row of request i's token j, and its draft; -1: none.

    metadata is vLLM's SpecDecodeMetadata; token counts[i] of request i is its bonus token, which has no draft.
    """
    width = metadata.max_spec_len + 1
    rows = np.full((len(counts), width), -1, np.int64)
    drafts = np.full((len(counts), width - 1), NOTHING, np.int32)
    drafted = np.arange(width - 1) < counts[:, None]
    drafts[drafted] = metadata.draft_token_ids.cpu().numpy()
    rows[:, :-1][drafted] = metadata.target_logits_indices.cpu().numpy()
    rows[np.arange(len(counts)), counts] = metadata.bonus_logits_indices.cpu().numpy()
    return rows, drafts


def output(tokens: np.ndarray, device):
    """Returns vLLM's SamplerOutput of int32 tokens [n, w]. LogprobStore has logprobs: vLLM's cost a sort per row."""
    from vllm.v1.outputs import SamplerOutput

    return SamplerOutput(sampled_token_ids=torch.from_numpy(tokens).to(device), logprobs_tensors=None)


def _of_rows(columns: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[rows] for name, values in columns.items()}
