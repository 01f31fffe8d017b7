"""A service in this process: a client's calls, answered with tokens drawn by sample key and weights, and with routes.

Ranks of a trainer publish with the product's own code; what they call is the coordinator's book of publications.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
from safetensors.torch import load_file
from tailrace_verl.server import TailraceServer
from tailrace_verl.settings import SERVER

from tailrace.app.calls.refused import accepted
from tailrace.deployments.coordinator.publications import Publications
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, SampleResult, Segment, WeightsLoaded
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.deployments.staging.slots import Slots, memory_source
from tailrace.policies.protocol.actions import SampleEnd

SLOTS = "stand-in"
VOCABULARY = 1000
LAYERS, EXPERTS, CHOSEN = 3, 300, 2


def routes_of(context: Sequence[int]) -> np.ndarray:
    """The stand-in's routes of a context, by token and place: uint16 [tokens, LAYERS, CHOSEN], none of them zero."""
    places, layers, chosen = np.ogrid[: len(context), :LAYERS, :CHOSEN]
    tokens = np.asarray(context)[:, None, None]
    return (1 + (7 * tokens + 31 * places + 5 * layers + chosen) % (EXPERTS - 1)).astype(np.uint16)


class StandIn:
    def __init__(self):
        self.version, self.weights = 0, {}
        self.batches: list[RolloutBatch] = []
        self.digest = self.broken = ""
        self.keeps, self.logged = True, set()  # samples by their index in the group, whose tokens come from the log
        spawn = asyncio.get_running_loop().create_task
        self.publishing = Publications(lambda: self.version, self._load, spawn, looked=lambda: asyncio.sleep(0))

    async def status(self):
        replica = SimpleNamespace(replica_id="one", observed_s=0.5, keeps_routes=self.keeps)
        return SimpleNamespace(weights_version=self.version, weights_digest=self.digest, replicas=(replica,))

    async def update_weights(self, version: int, source: str) -> WeightsLoaded:
        assert version > self.version
        self.weights = {k: v for path in Path(source).glob("*.safetensors") for k, v in load_file(path).items()}
        self.version = version
        return WeightsLoaded(version=version, replicas=("one",))

    async def _load(self, version: int, source: str, digest: str, score: tuple) -> WeightsLoaded:
        self.digest = digest
        folder = Slots(SLOTS).held()[memory_source(source)[1:]]
        return (await self.update_weights(version, str(folder))).model_copy(update={"digest": digest})

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
        routes = RoutedExperts(routes_of((*group.token_ids, *tokens[:-1]))) if self.keeps else None
        return SampleResult(
            sample_index=index,
            token_ids=tokens,
            text="",
            logprobs=tuple(-float(token) / VOCABULARY for token in tokens),
            raw_logprobs=tuple(0.0 for _ in tokens),
            finish_reason=SampleEnd.LENGTH if count == group.max_tokens else SampleEnd.STOP,
            segments=(Segment(weights_version=self.version, replica_id="one", start=0, end=count),),
            routed_experts=None if index in self.logged and group.samples > 1 else routes,
        )


class StandInServer(TailraceServer):
    """The plug-in's own server, whose client is the stand-in."""

    async def connected(self) -> StandIn:
        if self._client is None:
            self._client = self.stand_in = StandIn()
        return self._client

    async def status(self):
        return await (await self.connected()).status()

    async def publish(self, *call):
        return await (await self.connected()).publishing.run(*call)

    async def sent(self) -> list[tuple[str, int, int]]:
        """Of each batch: its prompt's name, samples and step."""
        return [(b.groups[0].prompt_id, b.groups[0].samples, b.step) for b in self.stand_in.batches]

    async def replay(self, replays: bool) -> None:
        """As if verl's `rollout.enable_rollout_routing_replay` were changed."""
        self._replays = replays

    async def tensors(self) -> dict:
        return self.stand_in.weights


class StandInClient:
    """A rank's client of the stand-in. The arguments are those of `tailrace.connect`."""

    def __init__(self, address: str, app_name: str):
        self._server = ray.get_actor(SERVER)
        self.publishing = self

    async def own_slots(self) -> str:
        return SLOTS

    async def status(self):
        return await self._server.status.remote()

    async def run(self, phase: str, version: int, rank: int, content: object = None):
        return accepted(await self._server.publish.remote(phase, version, rank, content), "publish_weights")
