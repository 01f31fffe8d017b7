"""The engines of `bench overhead`, each in a separate process on the same core: stock vLLM's, and ours by its drafts.

Invariant: only one engine works at a time. All have the same model, the same limits of the scheduler, and no logprobs
of vLLM's. Called by overhead.py.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import NamedTuple

import numpy as np

from tailrace.app.errors import Failed
from tailrace.deployments.messages.chunk import ChunkRequest, KvPlan, sample_key
from tailrace.deployments.messages.context import GroupRef, PastAnswer
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.kvpool.pool_config import PoolEndpoint
from tailrace.lab.benchmarks.drafting.budgets import EarlierDrafts
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.families.goodput import Goodput

STOCK, OFF, MISS, HIT, POOL = "stock", "off", "miss", "hit", "pool"
KINDS = (STOCK, OFF, MISS, HIT, POOL)
"""Kinds of engines; the last one is ours without drafts and with a KV pool."""

RUNNERS = V1, V2 = "v1", "v2"
"""Names of vLLM's model runners. With v2 stock vLLM's engine and ours schedule asynchronously; vLLM's v1 does not do so
on a CPU.
"""

CONTEXT_TOKENS, ANSWER_TOKENS = 32, 1_600
GROUP = 16
"""Number of samples per prompt."""

HIT_TOKENS = 4
"""Number of tokens of each draft of HIT; for MISS the policy decides."""

VOCABULARY = 2_048
"""Size of the vocabulary from which prompts and given answers are drawn."""


class TimedSteps(NamedTuple):
    """Sums over some steps of one engine. `process_s`: processor seconds of all threads of its process."""

    steps: int
    tokens: int
    drafted: int
    wall_s: float
    process_s: float
    parts_s: dict[str, float]  # processor time of the step's thread


def config_of(model: str, samples: int, kind: str, runner: str) -> EngineConfig:
    """Returns the settings of an engine for at most `samples` at once, on one core.

    `runner`: vLLM's model runner. It is set without validation, which refuses v2 on a CPU.
    """
    drafts = DraftConfig(method="group" if kind in (MISS, HIT) else "off")
    settings = {"max_running": samples, "max_model_len": 2_048, "kv_cache_gib": 1.0, "cores": 1}
    return EngineConfig(model=model, draft=drafts, **settings).model_copy(update={"model_runner": runner})


class EngineProcess:
    """One engine in a separate process, called only by these methods."""

    def __init__(self, model: str, samples: int, kind: str, pool: PoolEndpoint | None = None, runner: str = V1):
        arguments = (config_of(model, samples, kind, runner), kind, pool if kind == POOL else None)
        self._process = ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=arguments)

    def begin(self, samples: int) -> None:
        """Adds this many samples, and steps until all decode."""
        self._process.submit(_call, "begin", samples).result()

    def run(self, steps: int) -> TimedSteps:
        return self._process.submit(_call, "run", steps).result()

    def end(self) -> None:
        """Aborts the samples."""
        self._process.submit(_call, "end").result()

    def stop(self) -> None:
        self._process.shutdown()


# ---- in the engine's process -----------------------------------------------------------------------------

_engine = None
"""Engine of this process, shared by all calls."""

_kept = ExitStack()
"""Contexts that stay open as long as this process."""


def _start(config: EngineConfig, kind: str, pool: PoolEndpoint | None) -> None:
    global _engine  # noqa: PLW0603 - a worker process has no other place for what its calls share
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to stdout, which belongs to the result
    if config.model_runner == V2:
        from tailrace.lab.benchmarks.engine.second_runner import second_runner

        _kept.enter_context(second_runner())
    _engine = StockEngine(config) if kind == STOCK else OurEngine(config, kind, pool)


def _call(name: str, *args):
    return getattr(_engine, name)(*args)


def prompt(number: int) -> np.ndarray:
    """Returns the token ids of a group's prompt, int32."""
    return np.random.default_rng(number).integers(3, VOCABULARY, CONTEXT_TOKENS, np.int32)


class TimedEngine:
    """Base of both engines: counts calls of `begin`, and times steps. `kernels`: those of vLLM's second runner."""

    kernels = None

    def __init__(self):
        from tailrace.lab.benchmarks.engine.step_parts import StepParts

        self.parts, self.begun, self.names = StepParts(), 0, []

    def take_kernels(self, engine) -> None:
        """Wraps the kernels of an engine of vLLM's second runner, to record and replay them.

        Must be called before the timers are set, so that they time the replay.
        """
        from triton.runtime.interpreter import GridExecutor

        from tailrace.lab.benchmarks.engine.recorded_kernels import RecordedKernels

        core = engine.engine_core.engine_core
        self.kernels = RecordedKernels(GridExecutor, core.model_executor.driver_worker.worker.model_runner)

    def settle(self) -> None:
        """Records the kernels of a step in which all samples decode, and replays them in later steps."""
        if self.kernels is not None:
            self.turn()
            with self.kernels.record():
                self.turn()

    def forget(self) -> None:
        """Ends the replay of kernels, because another batch follows."""
        if self.kernels is not None:
            self.kernels.stop()

    def run(self, steps: int) -> TimedSteps:
        tokens, drafted, wall_s, process_s = self.made(), 0, 0.0, 0.0
        self.parts.take()
        for _ in range(steps):
            drafted += self.drafted()
            wall, process = time.perf_counter(), time.process_time()
            self.turn()
            wall_s, process_s = wall_s + time.perf_counter() - wall, process_s + time.process_time() - process
        return TimedSteps(
            steps=steps,
            tokens=self.made() - tokens,
            drafted=drafted,
            wall_s=wall_s,
            process_s=process_s,
            parts_s=self.parts.take(),
        )


class StockEngine(TimedEngine):
    """vLLM's LLMEngine with its own worker."""

    def __init__(self, config: EngineConfig):
        super().__init__()
        self._tokens = 0
        from tailrace.deployments.vllm_exact import launch

        plain = launch.engine_arguments
        launch.engine_arguments = lambda config: {k: v for k, v in plain(config).items() if k != "worker_cls"}
        self._engine = launch.launch(config, 0, ahead=config.runs_ahead)
        if config.model_runner == V2:
            self.take_kernels(self._engine)
        from tailrace.lab.benchmarks.engine.step_parts import around_vllm

        around_vllm(self.parts, self._engine)

    def begin(self, samples: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self.begun += 1
        settings = {"temperature": 1.0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **settings)
        for number in range(samples):
            tokens = prompt(self.begun * 1_000 + number // GROUP).tolist()
            self.names.append(self._engine.add_request(f"{self.begun}-{number}", tokens_input(tokens), params))
        waiting = {f"{self.begun}-{number}" for number in range(samples)}
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}
        self.settle()

    def turn(self) -> None:
        self._tokens += sum(len(output.outputs[0].token_ids) for output in self._engine.step())

    def made(self) -> int:
        return self._tokens

    def drafted(self) -> int:
        return 0

    def end(self) -> None:
        self.forget()
        self._engine.abort_request(self.names, internal=True)
        self.names.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


class Answers(EarlierDrafts):
    """The feed of an engine whose groups have answers of an earlier epoch."""

    def release(self, _group) -> None:
        """Does nothing: this feed keeps nothing for a group."""


class OurEngine(TimedEngine):
    """Our engine, as its replica's thread runs it: each turn runs commands, makes a step and takes a snapshot of the
    figures.
    """

    def __init__(self, config: EngineConfig, kind: str, pool: PoolEndpoint | None):
        super().__init__()
        self._kv = None if pool is None else KvPlan(0)
        self._replayed, self._answers = kind == HIT, {}
        self._policy = FixedBudget(tokens=HIT_TOKENS) if kind == HIT else Goodput()
        from tailrace.deployments.engine.engine_loop import EngineLoop
        from tailrace.deployments.engine.stepper import Stepper
        from tailrace.lab.benchmarks.engine.step_parts import around_ours

        feed = Answers(self._answers) if kind in (MISS, HIT) else None
        self._stepper = Stepper(config=config, replica_id="bench", weights_version=0, rank=0, pool=pool, feed=feed)
        if config.model_runner == V2:
            self.take_kernels(self._stepper._engine)
        around_ours(self.parts, self._stepper)
        self._loop = EngineLoop(self._stepper)

    def begin(self, samples: int) -> None:
        self.begun += 1
        for number in range(samples):
            chunk = self._chunk(number)
            self.names.append(chunk.chunk_id)
            self._loop.submit(chunk, self._take)
        while not all(one.first_token_s for one in self._running()) or len(self._running()) < samples:
            self._turn_well()
        self.settle()

    def _chunk(self, number: int) -> ChunkRequest:
        group, forced = f"{self.begun}/{number // GROUP}", None
        ref, tokens = GroupRef(group, group), prompt(self.begun * 1_000 + number // GROUP)
        if self._replayed:
            forced = np.random.default_rng((self.begun, number)).integers(3, VOCABULARY, ANSWER_TOKENS, np.int32)
            self._answers.setdefault(ref, []).append(PastAnswer(group, 0, 0, None, forced))
        return ChunkRequest(
            chunk_id=f"{self.begun}-{number}",
            sample_key=sample_key(0, self.begun, group, number),
            token_ids=tokens,
            prompt_tokens=CONTEXT_TOKENS,
            max_tokens=ANSWER_TOKENS,
            sampling=SamplingParams(ignore_eos=True),
            weights_version=0,
            kv=self._kv,
            draft=DraftPlan(
                group=ref,
                sample_index=number % GROUP,
                epoch=1,
                expected_tokens=ANSWER_TOKENS,
                class_starts=(0, 0),
                policy=self._policy,
            ),
            forced=forced,
        )

    def _take(self, result) -> None:
        """Raises the error of a failed chunk, which stops the engine's loop: the next turn ends the benchmark.

        With recorded kernels errors are ignored. After a replay each chunk fails, because its records are all of one
        position.
        """
        if isinstance(result, Exception) and self.kernels is None:
            raise result

    def _running(self) -> list:
        return list(self._stepper._running.values())

    def turn(self) -> None:
        if self.kernels is None:
            self._turn_well()
        else:
            self._loop.turn(0.0)

    def _turn_well(self) -> None:
        """Runs a turn. Raises Failed if the engine has stopped, as it has no work left then."""
        if not self._loop.turn(0.0):
            raise Failed(f"an engine has stopped: {self._loop.problem}")

    def made(self) -> int:
        return self._stepper._pace.counts["tokens"]

    def drafted(self) -> int:
        """Returns the number of draft tokens of the next step."""
        return sum(len(one.request.spec_token_ids) for one in self._running())

    def end(self) -> None:
        self.forget()
        for name in self.names:
            self._loop.abort(name)
        self.names.clear()
        while self._stepper.busy:
            self.turn()
