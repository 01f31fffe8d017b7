"""Compares the tokens of the same samples alone, together, in chunks, and with drafts of their own answers.

Then many samples run in batches of two sizes: flips are the samples whose tokens part, per million tokens compared.
"""

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult
from tailrace.deployments.messages.context import GroupRef
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.engine import DRAFT_TOKENS, CheckedEngine

SAMPLINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 0.0},
)
GROUP = len(SAMPLINGS)
ALONE = GROUP + 1
"""Distance between two samples that run alone too: these have every sampling in turn."""

FLIPS = 256, 400
"""Number of samples and of tokens of each: 102,400 tokens."""


def parted(found: dict[int, np.ndarray], wanted: dict[int, np.ndarray]) -> dict:
    """Returns the number of samples whose tokens differ from those wanted, up to 8 of their first differences, and the
    tokens compared. Each sample is compared up to its first difference, since all later tokens follow from it.
    """
    first = {}
    for i, tokens in found.items():
        differ = np.flatnonzero(np.asarray(tokens) != np.asarray(wanted[i]))
        if len(differ):
            first[i] = int(differ[0])
    compared = sum(first.get(i, len(tokens) - 1) + 1 for i, tokens in found.items())
    return {
        "samples": len(found),
        "unlike": len(first),
        "tokens": compared,
        "first_unlike": dict(list(first.items())[:8]),
    }


def logprobs_moved(found, wanted) -> float:
    """Returns the largest distance of a logprob of two results before their tokens part; NaN if one is no number."""
    differ = np.flatnonzero(np.asarray(found.token_ids) != np.asarray(wanted.token_ids))
    until = int(differ[0]) if len(differ) else len(found.token_ids)
    return float(np.abs(found.logprobs[:until] - wanted.logprobs[:until]).max(initial=0.0))


class SameSamples:
    """Samples with prompts of 200 tokens. The four samples of a group share a prompt; each has another sampling."""

    def __init__(self, step: Measurements, engine: CheckedEngine, vocabulary: int):
        self._step, self._engine = step, engine
        self._count, self._length, self._each = step.place.of((32, 128, 32), (3, 6, 2))
        size = step.place.of(200, 8)
        self._prompts = [
            np.random.default_rng(i // GROUP).integers(3, vocabulary, size, np.int32) for i in range(self._count)
        ]
        self._wanted: dict[int, ChunkResult] = {}

    def compare(self) -> None:
        ways = self.together, self.again, self.alone, self.in_chunks, self.with_drafts
        for way in ways:
            self._step.tried(way.__name__.replace("_", " "), way)
        if tokens := {i: each.token_ids.tolist() for i, each in self._wanted.items()}:  # all that failed are alike
            self._step.say("tokens", digest=hash_of(tokens))

    def _ask(self, way: str, i: int, made, count: int, drafts: int = 0) -> ChunkRequest:
        given = self._prompts[i], made, count, f"g{i // GROUP}", drafts, SAMPLINGS[i % GROUP]
        return self._engine.chunk(f"{way}-{i}-{len(made)}", i, *given)

    def _run(self, way: str, samples: range, drafts: int = 0) -> dict[int, ChunkResult]:
        found = self._engine.run([self._ask(way, i, [], self._length, drafts) for i in samples])
        return {i: found[f"{way}-{i}-0"] for i in samples}

    def _unlike(self, found: dict[int, ChunkResult]) -> dict:
        """Returns the figures of `parted`, and the largest distance of a logprob before a sample's first difference."""
        wanted = {i: each.token_ids for i, each in self._wanted.items()}
        moved = [logprobs_moved(each, self._wanted[i]) for i, each in found.items()]
        figures = parted({i: each.token_ids for i, each in found.items()}, wanted)
        return figures | {"logprobs_moved": float(np.max(moved))}

    def together(self) -> dict:
        self._wanted = self._run("together", range(self._count))
        close = sum(len(each.close_calls) for each in self._wanted.values())
        return {"close_calls": close, "first": self._wanted[0].token_ids[:8].tolist()}

    def again(self) -> dict:
        return self._unlike(self._run("again", range(self._count)))

    def alone(self) -> dict:
        found: dict[int, ChunkResult] = {}
        for i in range(0, self._count, self._step.place.of(ALONE, 1)):
            found |= self._run("alone", range(i, i + 1))
        return self._unlike(found)

    def in_chunks(self) -> dict:
        """Runs the samples in chunks. Drops the cache between chunks, so that all earlier tokens are computed again."""
        made: dict[int, list[int]] = {i: [] for i in range(self._count)}
        for start in range(0, self._length, self._each):
            if start:
                self._engine.stepper.reset_cache()
            found = self._engine.run([self._ask("chunks", i, made[i], self._each) for i in made])
            made = {i: tokens + found[f"chunks-{i}-{start}"].token_ids.tolist() for i, tokens in made.items()}
        return parted(made, {i: each.token_ids for i, each in self._wanted.items()})

    def with_drafts(self) -> dict:
        for i, each in self._wanted.items():
            group = f"g{i // GROUP}"
            self._engine.answers.give(GroupRef(group, group), each.token_ids)
        found = self._run("drafts", range(self._count), DRAFT_TOKENS)
        took = {
            name: sum(getattr(each, name) for each in found.values()) for name in ("drafted_tokens", "accepted_tokens")
        }
        return self._unlike(found) | took


def hash_of(tokens: dict) -> str:
    """Returns a digest of tokens, by which the steps of one call can be compared."""
    from hashlib import blake2b

    return blake2b(repr(sorted(tokens.items())).encode(), digest_size=8).hexdigest()


def flips(step: Measurements, engine: CheckedEngine, vocabulary: int) -> dict:
    """Runs samples at temperature 1 all in one batch, then a quarter of them at a time. Returns the comparison, with
    flips per million tokens.
    """
    count, length = step.place.of(FLIPS, (4, 8))
    prompts = [np.random.default_rng((1, i)).integers(3, vocabulary, 8, np.int32) for i in range(count)]

    def tokens_of(way: str, samples: range) -> dict[int, np.ndarray]:
        chunks = {i: engine.chunk(f"{way}-{i}", i, prompts[i], [], length, f"flips{i}") for i in samples}
        found = engine.run(list(chunks.values()))
        return {i: found[chunk.chunk_id].token_ids for i, chunk in chunks.items()}

    whole, parts = tokens_of("whole", range(count)), {}
    for start in range(4):
        parts |= tokens_of("part", range(start, count, 4))
    found = parted(parts, whole)
    return found | {"flips_per_million": round(1e6 * found["unlike"] / found["tokens"], 1)}
