"""The engines of `bench windows`, each in a process: bfloat16, with vLLM's own passes or in windows of rows.

Invariant: only one engine works at a time; all are on the same core. Called by canonical_windows.py.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, sample_key
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig

CONTEXT_TOKENS, TIMED_TOKENS = 8, 900
LONG_CONTEXT = 256
"""Number of tokens of a prompt whose step is timed."""

VOCABULARY = 49_152

Answer = tuple[np.ndarray, np.ndarray]
"""Tokens of an answer, int32, and their raw logprobs, float32."""


def config_of(model: str, samples: int, window: int | None) -> EngineConfig:
    """Returns the settings of an engine for at most `samples` at once, on one core.

    `window`: rows of its windows; 0 for the engine's own windows of all sizes; None for no windows, at level `law`.
    """
    settings = {"max_running": samples, "max_model_len": 1_024, "kv_cache_gib": 1.0, "cores": 1, "dtype": "bfloat16"}
    level = "law" if window is None else "bits"
    return EngineConfig(model=model, exactness=level, draft=DraftConfig(method="off"), **settings)


class WindowedEngine:
    """One engine in a separate process, called only by these methods. `window`: see `config_of`."""

    def __init__(self, model: str, samples: int, window: int | None):
        arguments = (config_of(model, samples, window), window)
        self._process = ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=arguments)

    def begin(self, samples: int) -> None:
        """Adds this many samples, and steps until all decode."""
        self._process.submit(_call, "begin", samples).result()

    def seconds(self, steps: int) -> float:
        """Returns the seconds of processor time of some steps."""
        return self._process.submit(_call, "seconds", steps).result()

    def end(self) -> None:
        """Aborts the samples."""
        self._process.submit(_call, "end").result()

    def prompt_seconds(self) -> float:
        """Returns the seconds of processor time of a step that computes a prompt of LONG_CONTEXT tokens."""
        return self._process.submit(_call, "prompt_seconds").result()

    def answers(self, samples: int, tokens: int, at_once: int) -> list[Answer]:
        """Returns the answers of `samples` samples, of which `at_once` run together.

        The samples are the same in each engine and for each value of `at_once`.
        """
        return self._process.submit(_call, "answers", samples, tokens, at_once).result()

    def stop(self) -> None:
        self._process.shutdown()


# ---- in the engine's process -----------------------------------------------------------------------------

_engine = None
"""Engine of this process, shared by all calls."""


def _start(config: EngineConfig, window: int | None) -> None:
    global _engine  # noqa: PLW0603 - a worker process has no other place for what its calls share
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to stdout, which belongs to the result
    _engine = _Steps(config, window)


def _call(name: str, *args):
    return getattr(_engine, name)(*args)


def _prompt(number: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(number).integers(3, VOCABULARY, tokens, np.int32)


class _Steps:
    """A stepper and the ids of its chunks."""

    def __init__(self, config: EngineConfig, window: int | None):
        from tailrace.deployments.engine.stepper import Stepper
        from tailrace.deployments.vllm_exact import windows

        if window:
            windows.WINDOW, windows.SIZES = window, (window,)
        self._stepper, self._names, self._begun = Stepper(config, "bench", 0, 0), [], 0

    def begin(self, samples: int) -> None:
        for _ in range(samples):
            self._add(_prompt(self._begun, CONTEXT_TOKENS), TIMED_TOKENS)
        while self._stepper.step() or not all(map(len, map(self._stepper.peek, self._names))):
            pass

    def seconds(self, steps: int) -> float:
        began_s = time.process_time()
        for _ in range(steps):
            self._stepper.step()
        return time.process_time() - began_s

    def end(self) -> None:
        for name in self._names:
            self._stepper.abort(name, keep_kv=False)
        self._names = []
        while self._stepper.busy:
            self._stepper.step()

    def prompt_seconds(self) -> float:
        self._add(_prompt(self._begun, LONG_CONTEXT), 2)
        taken = self.seconds(1)
        self.end()
        return taken

    def answers(self, samples: int, tokens: int, at_once: int) -> list[Answer]:
        found = []
        for first in range(0, samples, at_once):
            for number in range(first, min(first + at_once, samples)):
                self._add(_prompt(number, CONTEXT_TOKENS), tokens, number)
            ended: dict[str, ChunkResult] = {}
            while self._stepper.busy:
                ended |= dict(self._stepper.step())
            found += [(ended[name].token_ids, ended[name].raw_logprobs) for name in self._names]
            self._names = []
        return found

    def _add(self, prompt: np.ndarray, tokens: int, number: int = 0) -> None:
        """Adds a chunk to the stepper. `number`: the sample's number, from which its key follows."""
        self._begun += 1
        self._names.append(f"{self._begun}")
        chunk = ChunkRequest(
            chunk_id=self._names[-1],
            sample_key=sample_key(0, 0, "bench", number),
            token_ids=prompt,
            prompt_tokens=len(prompt),
            max_tokens=tokens,
            sampling=SamplingParams(ignore_eos=True),
            weights_version=0,
        )
        self._stepper.add(chunk, time.monotonic())
