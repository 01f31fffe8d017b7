"""A service in this process: a client's calls, answered with tokens drawn by sample key and weights."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

from safetensors.torch import load_file
from tailrace_verl.server import TailraceServer

from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, SampleResult, Segment, WeightsLoaded
from tailrace.policies.protocol.actions import SampleEnd

VOCABULARY = 1000


class StandIn:
    def __init__(self):
        self.version, self.weights = 0, {}
        self.batches: list[RolloutBatch] = []
        self.broken = ""

    async def status(self):
        return type("Status", (), {"weights_version": self.version})

    async def update_weights(self, version: int, source: str, digest: str = "") -> WeightsLoaded:
        assert version >= self.version
        self.weights = {k: v for path in Path(source).glob("*.safetensors") for k, v in load_file(path).items()}
        self.version = version
        return WeightsLoaded(version=version, replicas=("one",))

    async def rollout(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        if self.broken:
            raise RuntimeError(self.broken)
        self.batches.append(batch)
        await asyncio.sleep(0)
        for group in batch.groups:
            samples = tuple(self._sample(batch, group, index) for index in range(group.samples))
            yield GroupResult(
                batch_id=batch.batch_id,
                prompt_id=group.prompt_id,
                prompt_token_ids=group.token_ids,
                samples=samples,
            )

    def _sample(self, batch, group, index: int) -> SampleResult:
        key = sample_key(batch.seed, batch.step, group.prompt_id, index)
        chance = random.Random(f"{key}/{group.token_ids}/{self.version}")
        count = min(group.max_tokens, chance.randint(4, 9))
        tokens = tuple(chance.randrange(3, VOCABULARY) for _ in range(count))
        return SampleResult(
            sample_index=index,
            token_ids=tokens,
            text="",
            logprobs=tuple(-float(token) / VOCABULARY for token in tokens),
            raw_logprobs=tuple(0.0 for _ in tokens),
            finish_reason=SampleEnd.LENGTH if count == group.max_tokens else SampleEnd.STOP,
            segments=(Segment(weights_version=self.version, replica_id="one", start=0, end=count),),
        )


class StandInServer(TailraceServer):
    """The plug-in's own server, whose client is the stand-in."""

    def _connect(self) -> StandIn:
        self.stand_in = StandIn()
        return self.stand_in

    async def sent(self) -> list[tuple[str, int, int]]:
        """Of each batch: its prompt's name, samples and step."""
        return [(b.groups[0].prompt_id, b.groups[0].samples, b.step) for b in self.stand_in.batches]

    async def tensors(self) -> dict:
        return self.stand_in.weights
