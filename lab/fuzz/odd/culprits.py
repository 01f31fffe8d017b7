"""Samples that no engine can run: engines refuse some, and under others a step raises. Their keys decide which.

Invariant: the behaviour of a sample depends on its key and on positions alone, so it is the same on every engine.
`problem` returns how a result breaks the laws of such samples: it ends as failed with the reason, after one offer.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.rollout import SampleResult
from tailrace.policies.protocol.actions import SampleEnd

REFUSED, RAISED = "no engine takes this request", "this request made the step raise"
"""Reasons, as drivers get them."""

HEAVY_SHARE = 0.2
"""Share of heavy samples, in runs in which two heavy samples in one step make it raise."""

MAX_WAIT_STEPS = 32
"""Maximum number of steps that a chunk may wait while a culprit is searched, unless company is to blame: searches
follow each other if there are several culprits. 60 seeds showed up to 7."""

POSITIONS = (1, 120)
"""First and last position in the whole sequence at which a culprit is one: prompts have up to 39 tokens."""


class Culprit(NamedTuple):
    """A sample that is refused, or under which a step raises, from the position `at` of its sequence on."""

    kind: str
    at: int


class Culprits:
    """The culprits of a run. `refused`, `raising`: shares of samples. `company`: whether two heavy samples in one step
    make it raise."""

    def __init__(self, refused: float = 0.0, raising: float = 0.0, company: bool = False):
        self._shares, self.company = {"refused": refused, "raises": raising}, company
        self._ends: Counter[tuple[int, bytes]] = Counter()  # by an engine, with the reason, by sample key and prompt
        self._asks: Counter[tuple[int, bytes]] = Counter()  # likewise, beyond the first
        self.offers = 1  # of a sample at once: a chunk and its copies
        self.excuses = 0  # events of the run that may have cost an engine's answer
        self.of = cache(self._draw)
        self.is_heavy = cache(self._weigh)

    def _draw(self, key: int) -> Culprit | None:
        for kind, share in self._shares.items():
            rng = Random(f"{kind}/{key}") if share else None
            if rng is not None and rng.random() < share:
                return Culprit(kind, rng.choice((0, rng.randint(*POSITIONS))))
        return None

    def _weigh(self, key: int) -> bool:
        return self.company and Random(f"heavy/{key}").random() < HEAVY_SHARE

    def refuses(self, key: int, position: int) -> bool:
        """Returns whether engines refuse a chunk of the sample whose context ends at this position."""
        culprit = self.of(key)
        return culprit is not None and culprit.kind == "refused" and position >= culprit.at

    def raises_at(self, key: int) -> int | None:
        """Returns the first position whose token no step can make, or None."""
        culprit = self.of(key)
        return culprit.at if culprit is not None and culprit.kind == "raises" else None

    def end(self, chunk: ChunkRequest) -> None:
        """Records that an engine ends a chunk with the reason."""
        self._ends[chunk.sample_key, chunk.token_ids[: chunk.prompt_tokens].tobytes()] += 1

    def ask_again(self, key: int, prompt: Sequence[int]) -> None:
        """Records that a driver has requested the sample once more."""
        self._asks[key, _bytes(prompt)] += 1

    def is_to_blame(self, key: int, error: str | None) -> bool:
        """Returns whether the error is the one of this culprit."""
        culprit = self.of(key)
        return culprit is not None and {"refused": REFUSED, "raises": RAISED}[culprit.kind] in (error or "")

    def problem(self, key: int, prompt: Sequence[int], sample: SampleResult) -> str | None:
        """Returns how a result breaks the laws of culprits and their mates, or None."""
        prompt_tokens = len(prompt)
        error, place = sample.error or "", prompt_tokens + len(sample.token_ids)
        failed, culprit = sample.finish_reason is SampleEnd.FAILED, self.of(key)
        if culprit is None:
            return f"an innocent sample ended by {error}" if failed and (REFUSED in error or RAISED in error) else None
        name = key, _bytes(prompt)
        if (ends := self._ends.pop(name, 0)) > (limit := self.offers * (1 + self._asks[name] + self.excuses)):
            return f"{ends} engines ended it, asked for up to {limit} times: {error}"
        from_start, early = prompt_tokens >= culprit.at, sample.finish_reason is SampleEnd.CANCELLED
        if sample.token_ids and place > culprit.at and (from_start or culprit.kind == "raises"):
            return f"{len(sample.token_ids)} tokens after {prompt_tokens}, though {culprit}"
        if from_start and not failed and not early:
            return f"ended by {sample.finish_reason}, though {culprit}"
        if culprit.kind == "refused" and REFUSED in error and place < culprit.at:
            return f"refused at {place}, though {culprit}"
        return None


def _bytes(prompt: Sequence[int]) -> bytes:
    return np.array(prompt, np.int32).tobytes()
