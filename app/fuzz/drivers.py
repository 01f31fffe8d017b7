"""Simulated RL drivers: batch after batch through the real client, weights updates between, and checks of every token.

Invariant: a driver ends when each of its steps has all groups, each once; whatever happens to the service meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from ray.exceptions import RayError

from tailrace.app.calls.client import RolloutClient, RolloutRejected, WeightsRejected
from tailrace.app.calls.refused import AdapterRejected
from tailrace.app.calls.resume import Heartbeat
from tailrace.app.calls.session import groups_of_answers
from tailrace.app.fuzz.cluster import SimulatedCluster
from tailrace.app.fuzz.disk import adapted, digest_of
from tailrace.app.fuzz.stepper import EOS, token_at
from tailrace.app.verification.asking import two_turns
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.liveness import RENEW_S
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch, SampleResult
from tailrace.policies.core.failures import MAX_LOST, MAX_LOST_ALONE
from tailrace.policies.protocol.actions import SampleEnd

AGAIN_S = 2.0

TURNS_SHARE = 0.4
"""Of the samples of a driver that asks for single ones."""

ADAPTED_SHARE = 0.7
"""Of the groups of a driver with an adapter."""

HOLDS_S = (0.0, 1.0, 60.0)


class Wrong(AssertionError):
    """A result that no run may give."""


@dataclass(frozen=True)
class DriverPlan:
    """One driver's work: `steps` steps or more, until `until_s` of the run, with `pause_s` seconds between.

    `updates`: whether it trains, that is updates the weights after each step.
    """

    name: str
    steps: int
    groups: int
    samples: int
    max_tokens: int
    updates: bool
    until_s: float
    pause_s: float
    seed: int
    priority: int = 0
    share: float = 1.0
    singles: bool = False  # asks for its samples one by one, in an open session
    adapted: bool = False  # loads an adapter of its name before each step, and asks some groups of it

    def batch(self, step: int) -> RolloutBatch:
        rng, chance = Random(f"{self.seed}/{self.name}/{step}"), Random(f"{self.seed}/{self.name}/{step}/adapters")
        groups = tuple(
            PromptGroup(
                prompt_id=f"p{number}",
                token_ids=tuple(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 40))),
                samples=rng.randint(1, self.samples),
                max_tokens=rng.randint(1, self.max_tokens),
                adapter=self.name if self.adapted and chance.random() < ADAPTED_SHARE else None,
            )
            for number in range(self.groups)
        )
        return RolloutBatch(
            batch_id=f"{self.name}-{step}",
            groups=groups,
            step=step,
            seed=self.seed,
            priority=self.priority,
            share=self.share,
        )


@dataclass
class Ledger:
    """Observations of all drivers of a run. `contents`: weights version -> contents that its tokens came from."""

    contents: dict[int, set[str]] = field(default_factory=lambda: {0: {"start"}})
    offered: dict[int, set[str]] = field(default_factory=lambda: {0: {"start"}})
    unread: set[int] = field(default_factory=set)  # versions that were accepted while no replica could read them
    samples: int = 0
    tokens: int = 0
    failed: int = 0
    cancelled: int = 0
    cancels: set[str] = field(default_factory=set)  # batches that somebody has cancelled
    version: int = 0  # the last one that an update gave
    policies_failed: bool = False  # a policy was in trouble: it may have ended batches


class TaskHeartbeat(Heartbeat):
    """A heartbeat on the virtual clock."""

    def __init__(self, beat: Callable[[], object]):
        self._task = asyncio.ensure_future(self._go_on(beat))

    def stop(self) -> None:
        self._task.cancel()

    async def _go_on(self, beat: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(RayError):
                await beat()


async def insisted(ask: Callable, *errors: type[Exception]):
    """The result of a call, made again after these errors."""
    while True:
        try:
            return await ask()
        except errors:
            await asyncio.sleep(AGAIN_S)


def driver_client(cluster: SimulatedCluster) -> RolloutClient:
    """The real client, in the present process."""
    return RolloutClient(telemetry=cluster.telemetry, handle=cluster.handle(), heartbeat=TaskHeartbeat)


class SimulatedDriver:
    """One driver. `done` counts its whole steps, and outlives its process."""

    def __init__(self, plan: DriverPlan, cluster: SimulatedCluster, ledger: Ledger):
        self.plan, self._cluster, self._ledger = plan, cluster, ledger
        self.done = 0
        self.ended = False
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        client = driver_client(self._cluster)
        while self.done < self.plan.steps or self._now() < self.plan.until_s:
            batch = self.plan.batch(self.done)
            if self.plan.adapted:
                await self._load_adapter(client)
            groups = await (self._roll_singles if self.plan.singles else self._roll)(client, batch)
            for group in batch.groups:
                self._check(batch, group, groups[group.prompt_id])
            if self.plan.updates:
                await self._update(client)
            self.done += 1
            await asyncio.sleep(self.plan.pause_s)
        self.ended = True

    async def _roll(self, client: RolloutClient, batch: RolloutBatch) -> dict[str, GroupResult]:
        """All groups of a batch. The client continues after faults by itself, unless its weights are overwritten."""
        groups: dict[str, GroupResult] = {}
        while True:
            self._cluster.log_disk.begin(batch.batch_id)
            try:
                async for group in client.rollout(batch):
                    if group.prompt_id in groups:
                        raise Wrong(f"{batch.batch_id}: group {group.prompt_id} came twice")
                    groups[group.prompt_id] = group
                break
            except WeightsRejected:
                groups.clear()
                await asyncio.sleep(AGAIN_S)
            except RolloutRejected:
                if not self._ledger.policies_failed:
                    raise
                groups.clear()
                await asyncio.sleep(AGAIN_S)
        if len(groups) < len(batch.groups):
            raise Wrong(f"{batch.batch_id}: {len(groups)} of {len(batch.groups)} groups came")
        return groups

    async def _roll_singles(self, client: RolloutClient, batch: RolloutBatch) -> dict[str, GroupResult]:
        """All groups of a batch, each sample on its own and in any order, some in two turns."""
        rng, turns = (Random(f"{batch.seed}/{batch.batch_id}/{name}") for name in ("singles", "turns"))
        wanted = [(group, index) for group in batch.groups for index in range(group.samples)]
        rng.shuffle(wanted)
        rank = {"priority": batch.priority, "share": batch.share}
        while True:
            session, late = client.open(batch.batch_id, seed=batch.seed, step=batch.step, **rank), []
            try:
                for group, index in wanted:
                    of = rng.choice((None, group.samples))
                    if turns.random() < TURNS_SHARE:
                        split, hold_s = turns.randint(1, group.max_tokens), turns.choice(HOLDS_S)
                        late.append(asyncio.ensure_future(two_turns(session, group, index, split, hold_s)))
                    else:
                        given = {"group": group.prompt_id, "index": index, "of": of, "adapter": group.adapter}
                        session.submit(group.token_ids, **given, max_tokens=group.max_tokens)
                    await asyncio.sleep(rng.choice((0.0, 0.0, 1.0)))
                answers = [answer async for answer in session.samples()]
                return groups_of_answers([*answers, *(await asyncio.gather(*late))])
            except (WeightsRejected, RolloutRejected) as error:
                if isinstance(error, RolloutRejected) and not self._ledger.policies_failed:
                    raise
                await asyncio.sleep(AGAIN_S)
            finally:
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
                await session.close()

    async def _update(self, client: RolloutClient) -> None:
        """Gives the service new weights, under the first version that is not taken."""
        version = self._ledger.version + 1
        while True:
            folder, content = f"w{version}", f"content-{version}"
            self._cluster.disk.folders[folder] = content
            self._ledger.offered.setdefault(version, set()).add(content)
            try:
                loaded = await client.update_weights(version, folder)
            except RayError:
                await asyncio.sleep(AGAIN_S)
                continue
            except WeightsRejected:
                await asyncio.sleep(AGAIN_S)
                version = max(version, (await insisted(client.status, RayError)).weights_version + 1)
                continue
            if loaded.version != version:
                raise Wrong(f"update to {version} answered with {loaded.version}")
            self._ledger.version = version
            if not loaded.digest:
                self._ledger.unread.add(version)
            return

    async def _load_adapter(self, client: RolloutClient) -> None:
        """Gives its adapter the content of this step."""
        content = f"{self.plan.name}-{self.done}"
        self._cluster.disk.folders[f"/{content}"] = content
        loaded = await insisted(lambda: client.load_adapter(self.plan.name, f"/{content}"), RayError, AdapterRejected)
        if loaded.digest != digest_of(content):
            raise Wrong(f"adapter {content} was loaded as {loaded.digest}")

    def _check(self, batch: RolloutBatch, group: PromptGroup, result: GroupResult) -> None:
        where = f"{batch.batch_id}/{group.prompt_id}"
        if (result.batch_id, result.prompt_token_ids) != (batch.batch_id, group.token_ids):
            raise Wrong(f"{where}: the result is of another prompt")
        if [sample.sample_index for sample in result.samples] != list(range(group.samples)):
            raise Wrong(f"{where}: samples {[sample.sample_index for sample in result.samples]} of {group.samples}")
        for sample in result.samples:
            self._check_sample(batch, group, sample, f"{where}#{sample.sample_index}")

    def _check_sample(self, batch: RolloutBatch, group: PromptGroup, sample: SampleResult, where: str) -> None:
        ledger, tokens = self._ledger, sample.token_ids
        ledger.samples += 1
        ledger.tokens += len(tokens)
        ledger.failed += sample.finish_reason is SampleEnd.FAILED
        ledger.cancelled += sample.finish_reason is SampleEnd.CANCELLED
        spans = [(segment.start, segment.end) for segment in sample.segments]
        if [start for start, _ in spans] != [0, *(end for _, end in spans)][: len(spans)]:
            raise Wrong(f"{where}: segments {spans} do not follow each other")
        if (spans[-1][1] if spans else 0) != len(tokens) or len(sample.logprobs) != len(tokens):
            raise Wrong(f"{where}: {len(tokens)} tokens, {len(sample.logprobs)} logprobs, segments {spans}")
        key = sample_key(batch.seed, batch.step, group.prompt_id, sample.sample_index)
        for segment in sample.segments:
            place = len(group.token_ids) + segment.start
            own = digest_of(f"{group.adapter}-{batch.step}") if group.adapter else ""
            if segment.adapter_digest != own:
                raise Wrong(f"{where}: tokens {segment.start} on are of adapter {segment.adapter_digest}, not {own}")
            self._check_segment(key, place, tokens[segment.start : segment.end], segment, where)
        self._check_end(group, sample, where)
        if (problem := self._cluster.log_disk.problem(batch.batch_id, group.prompt_id, sample)) is not None:
            raise Wrong(f"{where}: {problem}")
        if sample.finish_reason is SampleEnd.CANCELLED and batch.batch_id not in ledger.cancels:
            raise Wrong(f"{where}: cancelled without a request")
        by_themselves = MAX_LOST_ALONE if self._cluster.deadly else MAX_LOST_ALONE + MAX_LOST
        may_be_deadly = len(self._cluster.gone) >= by_themselves and " left: " in (sample.error or "")
        if sample.finish_reason is SampleEnd.FAILED and not may_be_deadly and key not in self._cluster.deadly:
            raise Wrong(f"{where}: given up: {sample.error}")

    def _check_segment(self, key: int, place: int, tokens: tuple[int, ...], segment, where: str) -> None:
        version, mean, own = segment.weights_version, self._cluster.size.mean_tokens, segment.adapter_digest
        fits = {
            content
            for content in self._ledger.offered.get(version, ())
            if all(token_at(key, adapted(content, own), place + i, mean) == token for i, token in enumerate(tokens))
        }
        if not fits:
            raise Wrong(f"{where}: tokens {segment.start} to {segment.end} are not those of weights {version}")
        if len(tokens) >= 8:  # else two contents may agree by chance
            known = self._ledger.contents.setdefault(version, fits)
            self._ledger.contents[version] = known & fits or fits
            if not known & fits and not self._cluster.forgetful:
                raise Wrong(f"{where}: weights {version} are {fits} here, and were {known} before")

    def _check_end(self, group: PromptGroup, sample: SampleResult, where: str) -> None:
        tokens = sample.token_ids
        stops = [place for place, token in enumerate(tokens) if token == EOS]
        if stops and stops != [len(tokens) - 1]:
            raise Wrong(f"{where}: tokens follow its end at {stops[0]}")
        if (sample.finish_reason is SampleEnd.STOP) != bool(stops):
            raise Wrong(f"{where}: {len(tokens)} tokens, ends at {stops}, finish_reason {sample.finish_reason}")
        if sample.finish_reason is SampleEnd.LENGTH and len(tokens) != group.max_tokens:
            raise Wrong(f"{where}: {len(tokens)} tokens of at most {group.max_tokens} end it by length")
