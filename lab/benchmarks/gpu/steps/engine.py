"""Our engine on the thread of a step, without Ray: chunks in, results out. Drafts come from answers that the step
gives.

The engine's workers have a PassClock, by vLLM's setting `worker_extension_cls`.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, sample_key
from tailrace.deployments.messages.context import Fetched, GroupRef, PastAnswer
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.lab.benchmarks.gpu.made_models import DUMMY, SHAPES, model_of, shape_for
from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.protocol.exactness import Exactness

CLOCK = "tailrace.lab.benchmarks.gpu.pass_clock.PassClock"
DRAFT_TOKENS = 4
KV_GIB = {"1.7B": 24.0, "8B": 32.0}
"""GiB of the KV cache by shape: 256 samples of 600 tokens need more than 8 GiB there."""

INVARIANT = "VLLM_BATCH_INVARIANT"
EAGER = os.environ.get("TAILRACE_GPU_EAGER") == "1"
"""Whether engines start without torch.compile and CUDA graphs, as in the second try of a step that failed."""


def config_of(place: Place, model: str, eager: bool = False, running: int = 64, draft: str = "group",
              runner: str = "v1", level: Exactness = "bits", **more) -> EngineConfig:  # fmt: skip
    """Returns settings of an engine that fit the place: on CPUs always V1 and eager. `more`: GiB of its KV cache
    (`gib`), its longest context (`length`), and arguments for vLLM.
    """
    gib, length, vllm_args = more.pop("gib", 8.0), more.pop("length", 4096), more
    sizes = {"max_running": running, "max_model_len": length, "max_batched_tokens": 8192, "kv_cache_gib": gib}
    if place.small:
        sizes = {"max_running": 4, "max_model_len": 256, "max_batched_tokens": 64, "kv_cache_gib": 0.02}
    if place.card and (eager or EAGER or place.small):
        vllm_args["enforce_eager"] = True
    return EngineConfig(
        model=model,
        device="gpu" if place.card else "cpu",
        dtype=place.dtype,
        exactness=level,
        model_runner=runner if place.card else "v1",
        block_tokens=16 if place.card else 32,  # as serve.gpu.yaml and serve.yaml have it
        cores=None if place.card else 1,
        draft=DraftConfig(method=draft, draft_tokens=DRAFT_TOKENS),
        vllm_args={"worker_extension_cls": CLOCK} | vllm_args,
        **sizes,
    )


def made(place: Place, shape: str, seed: int = 0) -> tuple[str, dict]:
    """Returns the model folder of a shape, in a small run that of a tiny one, and the arguments with which vLLM loads
    it.
    """
    name = shape_for(shape, place.small)
    arguments = {"load_format": "dummy"} if name in DUMMY else {}
    return str(model_of(name, place.models, seed, place.device)), arguments


def vocabulary_of(place: Place, shape: str) -> int:
    return SHAPES[shape_for(shape, place.small)].vocabulary


def force_invariant(launch) -> None:
    """Has engines of level `law` that this process starts later run batch-invariant kernels. They may have any
    attention backend; `bits` refuses some.
    """
    settings = launch.process_settings
    launch.process_settings = lambda *given: settings(*given) | {INVARIANT: "1"}


class GivenAnswers:
    """The feed of an engine: answers that a step has given for a group, as those of an earlier epoch."""

    def __init__(self):
        self._answers: dict[GroupRef, list[PastAnswer]] = {}
        self._ready: list[Fetched] = []

    def give(self, group: GroupRef, tokens: np.ndarray) -> None:
        answer = PastAnswer(group.prompt_key, 0, 0, None, np.asarray(tokens, np.int32))
        self._answers.setdefault(group, []).append(answer)

    def hold(self, group: GroupRef) -> None:
        if group in self._answers:
            self._ready.append(Fetched(group, [], self._answers.pop(group)))

    def take(self) -> list[Fetched]:
        ready, self._ready = self._ready, []
        return ready

    def append(self, *_piece) -> None:
        """Does nothing: no other engine drafts from the tokens."""

    def rest(self, _group: GroupRef) -> None:
        """Does nothing: the feed keeps no tokens of the group."""

    def release(self, _group: GroupRef) -> None:
        """Does nothing: the feed keeps no tokens of the group."""

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Does nothing: the feed holds nothing open."""


def _attention_of(layer) -> str:
    """Returns the name of an attention layer's backend, with the version of FlashAttention if it is that backend."""
    version = getattr(layer.impl, "vllm_flash_attn_version", None)
    return layer.attn_backend.get_name() + (f" {version}" if version else "")


class CheckedEngine:
    """Our engine for a step. `start_s`: seconds that its start took. `version`: weights version of new chunks."""

    def __init__(self, config: EngineConfig, pool=None):
        from tailrace.deployments.engine.engine_loop import EngineLoop
        from tailrace.deployments.engine.stepper import Stepper

        began_s, self.answers, self.version = time.perf_counter(), GivenAnswers(), 0
        feed = self.answers if config.draft.drafts else None
        self.stepper = Stepper(config=config, replica_id="gpu-check", weights_version=0, rank=0, pool=pool, feed=feed)
        self.loop = EngineLoop(self.stepper)
        self.start_s = time.perf_counter() - began_s

    @property
    def llm(self):
        """vLLM's LLMEngine."""
        return self.stepper._engine

    def about(self) -> dict:
        """Returns the seconds of the start, and the choices that vLLM has made."""
        config = self.llm.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        return {
            "start_s": self.start_s,
            "compiled": str(config.compilation_config.mode),
            "graphs": str(config.compilation_config.cudagraph_mode),
            "attention": sorted({_attention_of(layer) for layer in layers if hasattr(layer, "attn_backend")}),
            "kv_blocks": config.cache_config.num_gpu_blocks,
        }

    def chunk(self, name: str, sample: int, prompt: np.ndarray, made: Sequence[int], count: int, group: str = "",
              drafts: int = 0, sampling: dict | None = None, **more) -> ChunkRequest:  # fmt: skip
        """Returns a chunk of `count` tokens that continues the tokens `made` so far. `drafts`: tokens of each draft, 0
        for none.
        """
        plan = None
        if drafts:
            budget = FixedBudget(tokens=drafts)
            plan = DraftPlan(
                group=GroupRef(group, group),
                sample_index=sample,
                epoch=1,
                expected_tokens=512,
                class_starts=(0, 0),
                policy=budget,
            )
        return ChunkRequest(
            chunk_id=name,
            sample_key=sample_key(7, 0, group, sample),
            token_ids=np.concatenate([prompt, np.asarray(made, np.int32)]).astype(np.int32),
            prompt_tokens=len(prompt),
            max_tokens=count,
            sampling=SamplingParams(ignore_eos=True, **(sampling or {})),
            weights_version=self.version,
            draft=plan,
            **more,
        )

    def run(self, chunks: list[ChunkRequest]) -> dict[str, ChunkResult]:
        """Runs chunks together to their ends. Returns their results by id. Raises the error of a chunk that failed."""
        found: dict[str, ChunkResult | Exception] = {}
        for one in chunks:
            self.loop.submit(one, lambda result, one=one: found.__setitem__(one.chunk_id, result))
        while len(found) < len(chunks):
            self.turn()
            self.settle()
        for each in found.values():
            if isinstance(each, Exception):
                raise each
        return found

    def turn(self) -> None:
        """Runs one turn of the engine. Raises RuntimeError if the engine is not healthy."""
        self.loop.turn(0.0)
        if self.loop.problem:
            raise RuntimeError(self.loop.problem)

    def settle(self) -> None:
        """Waits until the answers given for the groups that run are indexed. Another thread indexes them, on a busy
        machine maybe after the steps that are to draft from them.
        """
        if self.stepper._drafts is not None:
            self.stepper._drafts.settle()

    def obeyed(self, future: Future):
        """Runs turns until a command is done. Returns its result, or raises its error."""
        while not future.done():
            self.loop.turn(0.0)
        return future.result()
