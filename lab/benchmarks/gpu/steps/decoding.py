"""Milliseconds of a step, and of its parts, while a number of samples decode in our engine or in stock vLLM.

An engine here is any object with `begin`, `turn`, `made`, `end` and `llm`. Invariant: no sample ends while steps are
timed.
"""

import time
from statistics import median

import numpy as np

from tailrace.deployments.messages.context import GroupRef
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.engine import DRAFT_TOKENS, CheckedEngine

OFF, MISS, HIT = "off", "miss", "hit"
SAMPLES = (8, 64, 256)
PROMPT_TOKENS, ANSWER_TOKENS, GROUP = 32, 1_600, 8
ROUNDS, STEPS, WARM_STEPS = 6, 16, 16
WRONG = [7] * DRAFT_TOKENS
"""Draft tokens that are nearly never right."""


def prompt(number: int, vocabulary: int) -> np.ndarray:
    """Returns the token ids of a group's prompt, int32."""
    return np.random.default_rng(number).integers(3, vocabulary, PROMPT_TOKENS, np.int32)


class OurDecoding:
    """Samples that our engine decodes, with drafts of one kind: OFF for none, MISS for wrong ones, HIT for the tokens
    of the answer, which is forced.
    """

    begun = 0  # counts over all instances of a process, so that no prompt occurs twice

    def __init__(self, engine: CheckedEngine, vocabulary: int, kind: str, answer_tokens: int):
        self._engine, self._vocabulary, self._kind = engine, vocabulary, kind
        self._answer_tokens, self._names = answer_tokens, []
        self.llm = engine.llm

    def begin(self, samples: int) -> None:
        OurDecoding.begun += 1
        for number in range(samples):
            chunk = self._chunk(number)
            self._names.append(chunk.chunk_id)
            self._engine.loop.submit(chunk, _refuse)
        running = self._engine.stepper._running
        while len(running) < samples or not all(one.first_token_s for one in running.values()):
            self._engine.turn()
        self._engine.settle()

    def _chunk(self, number: int):
        group = f"decoding-{self.begun}-{number // GROUP}"
        forced, drafts = None, DRAFT_TOKENS if self._kind != OFF else 0
        if self._kind == HIT:
            rng = np.random.default_rng((self.begun, number))
            forced = rng.integers(3, self._vocabulary, self._answer_tokens, np.int32)
            group = f"{group}-{number}"
            self._engine.answers.give(GroupRef(group, group), forced)
        tokens = prompt(1_000 * self.begun + number // GROUP, self._vocabulary)
        name = f"decoding-{self.begun}-{number}"
        return self._engine.chunk(name, number, tokens, [], self._answer_tokens, group, drafts, forced=forced)

    def turn(self) -> None:
        if self._kind == MISS:
            self._engine.stepper.draft_for_all(WRONG)
        self._engine.turn()

    def made(self) -> int:
        """Returns the number of tokens since the engine's start."""
        return self._engine.stepper._pace.counts["tokens"]

    def end(self) -> None:
        for name in self._names:
            self._engine.loop.abort(name)
        self._names.clear()
        while self._engine.stepper.busy:
            self._engine.turn()


def _refuse(result) -> None:
    """Raises the error of a chunk that failed, which ends the measurement. Ignores other results."""
    if isinstance(result, Exception):
        raise result


def timed(step: Measurements, decoding, samples: int) -> dict:
    """Times rounds of steps while `samples` samples decode. `ms_a_step` is the median of the rounds, `spread_ms` has
    the least and the greatest. `host_ms` is processor time of all threads of this process per step. PassClock's figures
    are added.
    """
    rounds, steps, warm = step.place.of((ROUNDS, STEPS, WARM_STEPS), (1, 2, 1))
    decoding.begin(samples)
    try:
        for _ in range(warm):
            decoding.turn()
        decoding.llm.collective_rpc("watch_passes")
        walls, made, process_s, began_s = [], decoding.made(), time.process_time(), time.perf_counter()
        for _ in range(rounds):
            round_s = time.perf_counter()
            for _ in range(steps):
                decoding.turn()
            walls.append(1e3 * (time.perf_counter() - round_s) / steps)
        process_s, wall_s = time.process_time() - process_s, time.perf_counter() - began_s
        tokens, passes = decoding.made() - made, decoding.llm.collective_rpc("pass_times")[0]
    finally:
        decoding.end()
    return {
        "ms_a_step": round(median(walls), 3),
        "spread_ms": [round(min(walls), 3), round(max(walls), 3)],
        "host_ms": round(1e3 * process_s / (rounds * steps), 3),
        "tokens_of_a_sample_and_step": round(tokens / (rounds * steps * samples), 3),
        "tokens_a_second": round(tokens / wall_s),
    } | passes


def our_times(step: Measurements, engine: CheckedEngine, vocabulary: int) -> None:
    """Times steps with 8, 64 and 256 samples, with drafts off, missing and hitting."""
    for samples in step.place.of(SAMPLES, (2,)):
        for kind in (OFF, MISS, HIT):
            decoding = OurDecoding(engine, vocabulary, kind, step.place.of(ANSWER_TOKENS, 100))
            run = lambda decoding=decoding, samples=samples: timed(step, decoding, samples)  # noqa: E731
            step.tried(f"{samples} samples, drafts {kind}", run)
