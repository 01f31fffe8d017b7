"""Messages between coordinator and engines: one chunk's request and result, and an engine's report.

They cross the wire once per chunk or poll, so they are slotted dataclasses over numpy arrays. Token positions are
absolute: 0 is the first token of the prompt.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated

import numpy as np

from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.drafts import DraftPlan, DraftReport
from tailrace.deployments.messages.rollout import Mask, PromptLogprobs, SamplingParams, Top
from tailrace.deployments.messages.scores import Score
from tailrace.policies.protocol.events import ChunkEnd
from tailrace.policies.protocol.performance import Performance

TAGS = WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Parts of an engine's memory that sleep, by vLLM's names."""

STEP_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds, in seconds, of the buckets into which an engine counts its steps: from a small model's decode to a
prefill on a CPU.
"""

SampleKey = Annotated[int, "unsigned, 64 bits"]


def sample_key(seed: int, step: int, prompt_id: str, sample_index: int, turn: int = 0) -> SampleKey:
    """Returns the 64-bit key of a sample's noise: blake2b over (run seed, step, prompt id, sample index), and the turn
    unless it is the first one, 0.
    """
    text = f"{seed}\0{step}\0{prompt_id}\0{sample_index}" + (f"\0{turn}" if turn else "")
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"tailrace-sample").digest(), "little")


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Where a chunk's KV is read and whether it is saved. `min_pull_tokens`: minimum gain over the local cache that is
    worth a pull, or None for no pull. `digest`: digest of the weights `version`, whose KV is read and written.
    """

    version: int
    min_pull_tokens: int | None = 1
    save: bool = True  # at the chunk's end, for the sample's next chunk
    digest: str = ""
    save_stopped: bool = False  # also if a stop token ends it, for the sample's next turn


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """A request to generate at most `max_tokens` tokens after `token_ids` (int32: the prompt, the tokens so far, and in
    later turns also those that came between). `turn_start`: position where the present turn's answer begins; 0 stands
    for `prompt_tokens`.
    """

    chunk_id: str
    sample_key: SampleKey
    token_ids: np.ndarray
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    weights_version: int
    weights_digest: str = ""  # digest of `weights_version`; empty: any
    kv: KvPlan | None = None  # None for a replica without a pool
    draft: DraftPlan | None = None  # None for no drafting
    forced: np.ndarray | None = None  # int32, the whole answer to replay; index 0 is position `prompt_tokens`
    traceparent: str | None = None
    keep_trace: bool = False
    turn_start: int = 0
    adapter: Adapter | None = None  # None: no adapter
    routes_from: int = 0  # position of the first token whose routed experts the sample lacks, if the engine keeps them
    features: PromptFeatures | None = None  # on the wire a reference, see `deployments.engine.shared_features`

    @property
    def answer_start(self) -> int:
        """Position of the first token of the present turn's answer."""
        return self.turn_start or self.prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """True if its result has `prompt_logprobs`: a sample's first chunk does."""
        return self.sampling.prompt_logprobs is not None and len(self.token_ids) == self.answer_start


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """New tokens of one chunk (int32) and their logprobs (float32), all of one length; and the cause of its end."""

    chunk_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    end: ChunkEnd
    weights_version: int
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int  # context tokens whose KV was found
    computed_tokens: int  # context tokens that were prefilled again
    pulled_tokens: int = 0  # cached tokens that came from the pool
    stored_tokens: int = 0  # tokens of the final context that this chunk has put into the pool or found there
    kv_names: bytes = b""  # names of the context's full blocks, `kvpool.keys.NAME_BYTES` each
    recompute_cause: str = ""  # why computed_tokens were not found; see kvpool.scheduler
    verifications: int = 0  # engine steps that made tokens of this chunk
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: DraftReport | None = None  # None without a draft plan
    close_calls: tuple[int, ...] = ()  # places in token_ids that noise may change, see engine_config
    top_logprobs: tuple[Top, ...] = ()  # for each token's position, if requested
    sampling_mask: tuple[Mask, ...] = ()  # likewise
    prompt_logprobs: PromptLogprobs | None = None  # if this chunk gives them
    routed_experts: np.ndarray | None = None  # from `routes_from` to before the last token, see `RoutedExperts`


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one replica. Capacities never change; all else is as of `observed_at` (unix seconds)."""

    replica_id: str
    weights_version: int
    block_tokens: int
    kv_capacity_blocks: int
    max_running: int
    max_model_len: int
    draft_tokens: int  # look-ahead slots a running chunk may need beyond its own tokens
    observed_at: float
    weights_source: str = ""  # the source loaded last; empty: the folder that the engine was started on
    weights_pause_s: float = 0.0  # seconds without a token for the last load of weights
    weights_digest: str = ""  # names the content of the weights
    score: Score = ()  # of its weights, once they were loaded or woken
    score_drift: float = 0.0  # nats by which the weights before had changed in place, once they were replaced
    asleep: tuple[str, ...] = ()  # parts of its memory that are given back; it runs no chunk then
    steps: int = 0
    preemptions: int = 0
    running: dict[str, int] = field(default_factory=dict)  # chunk_id -> tokens generated so far
    methods: tuple[str, ...] = ()  # draft methods available now, the default first
    node_id: str = ""
    cores: tuple[int, ...] = ()  # cores of its node that its engine is bound to; empty: none
    started_at: float = 0.0  # unix seconds
    dtype: str = ""  # type of its weights in memory
    ranks: int = 1  # workers of its engine
    weight_transfer: str = ""  # the transfer engine of vLLM that its workers have; empty: none
    key_prefixes: tuple[str, ...] = ()  # a block of KV is kept under each of them, followed by `@` and its name in hex
    token_bytes: int = 0  # KV of one token, over all ranks
    pool_problem: str = ""  # why this replica runs without the pool that it should have
    kv_counts: dict[str, int] = field(default_factory=dict)  # since the replica started, by EVENT.CAUSE
    performance: Performance | None = None  # as of `observed_at`; None before steps of two sizes were measured
    # Since the replica started: steps and their microseconds, tokens, verifications; see deployments.drafting too.
    work: dict[str, int] = field(default_factory=dict)
    step_counts: tuple[int, ...] = ()  # steps by duration: one count for each of STEP_BOUNDS_S, and one above
    max_loras: int = 0  # adapters that its engine computes in a step; 0: it takes none
    adapters: tuple[Adapter, ...] = ()  # the last one of each name that it knows, loaded or not
    keeps_routes: bool = False  # results have the routed experts of their tokens


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """The weights that an engine computes with, read back. `checksums`: checksums of their values by saved name, zeros
    taken as positive, see `deployments.staging.checksums`. `unlike`: names whose values differ from those of their
    source; None if it has changed since or the weights are quantized, with the `problem`. Quantized ones have the names
    of vLLM's model.
    """

    version: int
    digest: str
    checksums: dict[str, str]
    unlike: tuple[str, ...] | None
    problem: str = ""
