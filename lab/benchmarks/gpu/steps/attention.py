"""Tests whether an attention backend is invariant: rows of one layer of a running engine, then a sample of the engine.

A row that decodes is computed alone, beside a prefill, and beside others that decode. Rows that verify drafts are
computed in one pass and one by one. The metadata and the KV cache are vLLM's own, so vLLM chooses tiles and splits as
in real steps. A distance of 0.0 means equal values; else it is the largest absolute difference.
"""

import numpy as np
import torch

from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.vllm_exact import launch
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.lab.benchmarks.gpu.steps.engine import (
    DRAFT_TOKENS,
    CheckedEngine,
    config_of,
    force_invariant,
    vocabulary_of,
)
from tailrace.lab.benchmarks.gpu.steps.exactness import logprobs_moved
from tailrace.lab.benchmarks.gpu.steps.operators import unlike
from tailrace.lab.benchmarks.gpu.steps.ours import started

CONTEXTS = (40, 300, 2000)
PREFILLS = (9, 10, 64, 512)
"""Numbers of tokens of a prefill. FlashAttention 3 packs a batch's rows in other tiles once its longest query has 10
tokens.
"""

DECODING = 63
"""Number of other rows that decode."""

DRAFTS = (1, 2, 4, 8, 16, 63)
SHAPE = "short"


def inputs(place: Place, backend: str):
    """Returns the arguments that vLLM would get on a GPU."""
    settings = {"level": "law", "attention_backend": backend}
    return launch.engine_arguments(config_of(place._replace(card=True), f"a folder of {SHAPE}", eager=True, **settings))


def attention(step: Measurements, backend: str) -> None:
    """Tests a backend by its name. On CPUs the name is ignored: there is only one backend."""
    if step.place.card and backend == "FLASHINFER" and not _has_flashinfer():
        return step.say("rows", skipped="FlashInfer is not installed")
    given = {"level": "law", "attention_backend": backend} if step.place.card else {}
    if step.place.card:
        force_invariant(launch)
    engine = started(step, SHAPE, eager=True, **given)
    rows = LayerRows(engine, step.place.device)
    step.say("backend", name=rows.backend, heads=rows.heads)
    for context in step.place.of(CONTEXTS, (20, 40)):
        step.tried(f"rows, context {context}", lambda context=context: of_context(step, rows, context))
    case = BesidePrompts(step, engine)
    for tokens in (0, *PREFILLS[:2]):
        step.tried(f"sample beside prompts of {tokens}", lambda tokens=tokens: case.moved(tokens))
    step.tried("sample with drafts", case.moved_by_drafts)


def _has_flashinfer() -> bool:
    from importlib.util import find_spec

    return find_spec("flashinfer") is not None


class LayerRows:
    """Rows of the first attention layer. Each row has its own blocks of the KV cache, and random queries, keys and
    values by position.
    """

    def __init__(self, engine: CheckedEngine, device: str):
        core = engine.llm.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self._config, self._device = engine.llm.vllm_config, device
        self._group = runner.attn_groups[0][0]
        self._name = self._group.layer_names[0]
        self._layer = self._config.compilation_config.static_forward_context[self._name]
        self.backend, self._rows = self._group.backend.get_name(), {}
        self.heads = [self._layer.num_heads, self._layer.num_kv_heads, self._layer.head_size]
        self._dtype = self._config.model_config.dtype
        cache, longest = self._config.cache_config, self._config.model_config.max_model_len
        self._block_tokens = cache.block_size
        self._blocks_of_row = min(longest // self._block_tokens, (cache.num_gpu_blocks - 1) // (DECODING + 2))
        self._longest = self._blocks_of_row * self._block_tokens

    def _tensors(self, row: int) -> list[torch.Tensor]:
        if row not in self._rows:
            heads, kv_heads, size = self.heads
            given = {"generator": torch.Generator(self._device).manual_seed(row), "device": self._device}
            made = [torch.randn(self._longest, n * size, **given) for n in (heads, kv_heads, kv_heads)]
            self._rows[row] = [each.to(self._dtype) for each in made]
        return self._rows[row]

    def fill(self, row: int, length: int) -> None:
        """Writes the KV of a row's first `length` positions to the cache."""
        for start in range(0, length, 512):
            self.run((row, start, min(512, length - start)))

    @torch.inference_mode()
    def run(self, *spans: tuple[int, int, int]) -> list[torch.Tensor]:
        """Runs one pass over spans of (row, first position, positions). Returns each span's outputs,
        `[positions, heads * size]`.
        """
        from vllm.forward_context import set_forward_context

        parts = [[each[start : start + count] for each in self._tensors(row)] for row, start, count in spans]
        query, keys, values = (torch.cat(each) for each in zip(*parts, strict=True))
        common = self._common(spans)
        metadata = dict.fromkeys(self._group.layer_names, self._group.build_metadata(common, 0))
        slots = dict.fromkeys(self._group.layer_names, common.slot_mapping)
        with set_forward_context(metadata, self._config, num_tokens=len(query), slot_mapping=slots):
            found = self._layer(query, keys, values)
        return list(found.split([count for _, _, count in spans]))

    def _common(self, spans: tuple[tuple[int, int, int], ...]):
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts, lengths = [count for _, _, count in spans], [start + count for _, start, count in spans]
        places = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
        first = np.repeat([1 + row * self._blocks_of_row for row, _, _ in spans], counts)
        tables = [[1 + row * self._blocks_of_row + i for i in range(self._blocks_of_row)] for row, _, _ in spans]
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        ints = {"device": self._device, "dtype": torch.int32}
        lengths_there = torch.tensor(lengths, **ints)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=lengths_there,
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(spans),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=torch.tensor(tables, **ints),
            slot_mapping=torch.from_numpy(first * self._block_tokens + places).to(self._device),
            is_prefilling=torch.tensor([start == 0 for _, start, _ in spans]),
            positions=torch.from_numpy(places).to(self._device),
        )


def of_context(step: Measurements, rows: LayerRows, context: int) -> dict:
    """Returns distances between a row computed alone and the same row computed again, beside prefills, and beside rows
    that decode. `verifying`: distances between the positions of a draft in one pass and one by one.
    """
    last = context - 1
    rows.fill(0, context)
    alone = rows.run((0, last, 1))[0]
    found = {"again": unlike(rows.run((0, last, 1))[0], alone), "beside_prefill": {}, "verifying": {}}
    for tokens in step.place.of(PREFILLS, PREFILLS[:2]):
        found["beside_prefill"][tokens] = unlike(rows.run((0, last, 1), (1, 0, tokens))[0], alone)
    others = range(1, 1 + step.place.of(DECODING, 3))
    for row in others:
        rows.fill(row, context)
    found["beside_decoding"] = unlike(rows.run((0, last, 1), *((row, last, 1) for row in others))[0], alone)
    for drafts in DRAFTS:
        if drafts < context:
            one_by_one = torch.cat([rows.run((0, last - drafts + i, 1))[0] for i in range(drafts + 1)])
            found["verifying"][drafts] = unlike(rows.run((0, last - drafts, drafts + 1))[0], one_by_one)
    return found


class BesidePrompts:
    """A sample of the engine: its tokens and logprobs alone, and in steps that each compute a new prompt too."""

    def __init__(self, step: Measurements, engine: CheckedEngine):
        self._engine, self._vocabulary = engine, vocabulary_of(step.place, SHAPE)
        self._length, size = step.place.of((64, 200), (8, 8))
        self._prompt = np.random.default_rng(0).integers(3, self._vocabulary, size, np.int32)
        self._wanted, self._turn = None, 0

    def _sample(self, beside: int, drafts: int = 0):
        """Returns the result of the sample. `beside`: tokens of the new prompt that is added for each of its steps, 0
        for none.
        """
        self._turn += 1
        found = []
        name, group = f"sample-{self._turn}", "beside"
        chunk = self._engine.chunk(name, 0, self._prompt, [], self._length, group, drafts)
        self._engine.loop.submit(chunk, found.append)
        while not found:
            if beside and name in self._engine.loop.stats().running:
                self._add(beside)
            self._engine.turn()
            self._engine.settle()
        while self._engine.stepper.busy:
            self._engine.turn()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _add(self, tokens: int) -> None:
        self._turn += 1
        prompt = np.random.default_rng((2, self._turn)).integers(3, self._vocabulary, tokens, np.int32)
        chunk = self._engine.chunk(f"prompt-{self._turn}", 0, prompt, [], 1, f"prompt-{self._turn}")
        self._engine.loop.submit(chunk, lambda _result: None)

    def moved(self, tokens: int) -> dict:
        """Returns the number of tokens that differ from those of the sample alone, the first of them, and the largest
        distance of a logprob before it. `tokens`: see `_sample`; the first call has 0. Raises RuntimeError, as
        `moved_by_drafts` does, if that call has failed.
        """
        found = self._sample(tokens)
        if not tokens:
            self._wanted = found
        return self._distance(found)

    def moved_by_drafts(self) -> dict:
        """Returns the figures of `moved` for the sample with drafts of its own answer, and the number of accepted
        tokens.
        """
        self._engine.answers.give(GroupRef("beside", "beside"), self._alone().token_ids)
        found = self._sample(0, DRAFT_TOKENS)
        return self._distance(found) | {"accepted_tokens": found.accepted_tokens}

    def _alone(self):
        if self._wanted is None:
            raise RuntimeError("there is nothing to compare with: the sample alone has failed")
        return self._wanted

    def _distance(self, found) -> dict:
        wanted = self._alone()
        differ = np.flatnonzero(found.token_ids != wanted.token_ids)
        return {
            "unlike_tokens": len(differ),
            "first_unlike": int(differ[0]) if len(differ) else None,
            "logprobs_moved": logprobs_moved(found, wanted),
        }
