"""Simulated RL drivers: batch after batch through the real client, with weights updates between and checks of every
token.

Invariant: a driver ends when each of its steps has all groups, each once, whatever happens to the service meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from ray.exceptions import RayError

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import AdapterRejected, QuotaExceeded, RolloutRejected, WeightsRejected
from tailrace.app.calls.resume import Heartbeat
from tailrace.app.calls.session import groups_of_answers
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.liveness import RENEW_S
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch
from tailrace.lab.fuzz.checks import Ledger, ResultChecks, Wrong
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.disk import digest_of
from tailrace.lab.fuzz.odd.hasty import HastySession, give_up
from tailrace.lab.fuzz.odd.impossible import ImpossibleAsks
from tailrace.lab.fuzz.worlds.grown_batch import GrownBatch
from tailrace.lab.fuzz.worlds.overtaking import OvertakenUpdate, check_loaded, check_refused
from tailrace.lab.fuzz.worlds.patient import PatientSession
from tailrace.lab.verification.asking import two_turns

AGAIN_S = 2.0

TURNS_SHARE = 0.4
"""Share of the samples with two turns, of a driver that requests single samples."""

ADAPTED_SHARE = 0.7
"""Share of the groups with the adapter, of a driver that has one."""

HOLDS_S = (0.0, 1.0, 60.0)


@dataclass(frozen=True)
class DriverPlan:
    """Work of one driver: `steps` steps or more, until second `until_s` of the run, with `pause_s` seconds between.

    `updates`: whether it is a trainer, which updates the weights after each step.
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
    impossible: bool = False  # asks also for things that no service can do
    hasty: bool = False  # gives calls up and makes them again at once
    grows: bool = False  # asks for some groups of a batch, and for more while it runs
    overtakes: bool = False  # gives two updates of the weights at about the same time
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
    """Returns the result of a call, which is repeated after these errors."""
    while True:
        try:
            return await ask()
        except errors:
            await asyncio.sleep(AGAIN_S)


def driver_client(cluster: SimulatedCluster) -> RolloutClient:
    """Returns a real client, in the present process."""
    return RolloutClient(telemetry=cluster.telemetry, handle=cluster.handle(), heartbeat=TaskHeartbeat)


class SimulatedDriver:
    """One driver. `done`: number of its whole steps, which outlives its process."""

    def __init__(self, plan: DriverPlan, cluster: SimulatedCluster, ledger: Ledger):
        self.plan, self._cluster, self._ledger = plan, cluster, ledger
        self.name = plan.name
        self.done = 0
        self.ended = False
        self._floor = 0  # weights version of its client's last update
        self._checks = ResultChecks(cluster, ledger)
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        client, self._floor = driver_client(self._cluster), 0
        while self.done < self.plan.steps or self._now() < self.plan.until_s:
            batch = self.plan.batch(self.done)
            if self.plan.adapted:
                await self._load_adapter(client)
            groups = await self._rolled(client, batch)
            for group in batch.groups:
                self._checks.check(batch, group, groups[group.prompt_id], self._floor)
            if self.plan.updates:
                self._floor = await self._updated(client)
            self.done += 1
            await asyncio.sleep(self.plan.pause_s)
        self.ended = True

    async def _rolled(self, client: RolloutClient, batch: RolloutBatch) -> dict[str, GroupResult]:
        """Returns all groups of a batch. The driver may request the impossible meanwhile."""
        roll = self._roll_singles if self.plan.singles else self._roll
        if not self.plan.impossible:
            return await roll(client, batch)
        asks = ImpossibleAsks(self._cluster, client, Random(f"{batch.seed}/{batch.batch_id}/impossible"))
        await asks.before(batch)
        meanwhile = asyncio.ensure_future(asks.meanwhile(batch))
        try:
            return await roll(client, batch)
        finally:
            meanwhile.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await meanwhile

    async def _roll(self, client: RolloutClient, batch: RolloutBatch) -> dict[str, GroupResult]:
        """Returns all groups of a batch. The client continues after faults by itself, unless its weights are
        overwritten."""
        groups: dict[str, GroupResult] = {}
        while True:
            self._cluster.log_disk.begin(batch.batch_id)
            try:
                if self.plan.hasty:
                    await give_up(client, batch, self._hurry(batch), partial(self._again, batch))
                if self.plan.grows and (grown := await self._grown(batch)) is not None:
                    groups |= grown
                    break
                async for group in client.rollout(batch):
                    if group.prompt_id in groups:
                        raise Wrong(f"{batch.batch_id}: group {group.prompt_id} came twice")
                    groups[group.prompt_id] = group
                break
            except QuotaExceeded:
                await asyncio.sleep(AGAIN_S)
            except WeightsRejected:
                groups.clear()
                self._cluster.culprits.excuses += 1
                await asyncio.sleep(AGAIN_S)
            except RolloutRejected:
                if not self._ledger.policies_failed:
                    raise
                groups.clear()
                self._cluster.culprits.excuses += 1
                await asyncio.sleep(AGAIN_S)
        if len(groups) < len(batch.groups):
            raise Wrong(f"{batch.batch_id}: {len(groups)} of {len(batch.groups)} groups came")
        return groups

    async def _roll_singles(self, client: RolloutClient, batch: RolloutBatch) -> dict[str, GroupResult]:
        """Returns all groups of a batch, each sample on its own and in any order, some in two turns."""
        rng, turns = (Random(f"{batch.seed}/{batch.batch_id}/{name}") for name in ("singles", "turns"))
        wanted = [(group, index) for group in batch.groups for index in range(group.samples)]
        rng.shuffle(wanted)
        rank = {"priority": batch.priority, "share": batch.share}
        while True:
            session, late = client.open(batch.batch_id, seed=batch.seed, step=batch.step, **rank), []
            asked = PatientSession(session)
            hasty = HastySession(asked, self._hurry(batch), partial(self._again, batch)) if self.plan.hasty else None
            quota = asked if self._cluster.size.quotas else None
            try:
                for group, index in wanted:
                    of = rng.choice((None, group.samples))
                    if turns.random() < TURNS_SHARE:
                        split, hold_s = turns.randint(1, group.max_tokens), turns.choice(HOLDS_S)
                        late.append(asyncio.ensure_future(two_turns(hasty or asked, group, index, split, hold_s)))
                    else:
                        given = {"group": group.prompt_id, "index": index, "of": of, "adapter": group.adapter}
                        given["max_tokens"] = group.max_tokens
                        if hasty is quota is None:
                            session.submit(group.token_ids, **given)
                        else:
                            one = (hasty or quota).generate(group.token_ids, **given)
                            late.append(asyncio.ensure_future(one))
                    await asyncio.sleep(rng.choice((0.0, 0.0, 1.0)))
                answers = [answer async for answer in session.samples()]
                return groups_of_answers([*answers, *(await asyncio.gather(*late))])
            except (WeightsRejected, RolloutRejected) as error:
                if isinstance(error, RolloutRejected) and not self._ledger.policies_failed:
                    raise
                self._cluster.culprits.excuses += 1
                await asyncio.sleep(AGAIN_S)
            finally:
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
                await session.close()

    async def _grown(self, batch: RolloutBatch) -> dict[str, GroupResult] | None:
        """Returns all groups of a batch that grows, or None if the service is in trouble. Some may be made again
        meanwhile."""
        for _ in range(len(batch.groups)):
            self._again(batch)
        rng = Random(f"{batch.seed}:{batch.batch_id}:grown:{self._now()}")
        sent = batch.model_copy(update={"min_weights_version": self._floor})
        grown = GrownBatch(self._cluster, sent, rng)
        groups = await grown.groups()
        if grown.refused is not None and not self._ledger.policies_failed:
            raise Wrong(f"{batch.batch_id} was refused as it grew: {grown.refused}")
        self._cluster.log_disk.begin(batch.batch_id)  # its streams are closed
        return groups

    def _hurry(self, batch: RolloutBatch) -> Random:
        return Random(f"{batch.seed}/{batch.batch_id}/hasty/{self._now()}")

    def _again(self, batch: RolloutBatch, request: dict | None = None) -> None:
        """Records a call that may make one of the batch's samples again, or all of them."""
        wanted = [(group, index) for group in batch.groups for index in range(group.samples)]
        for group, index in wanted:
            if request is None or (request["group"], request["index"]) == (group.prompt_id, index):
                key = sample_key(batch.seed, batch.step, group.prompt_id, index)
                self._cluster.culprits.ask_again(key, group.token_ids)

    async def _updated(self, client: RolloutClient) -> int:
        """Gives the service new weights. Returns their version."""
        version = self._ledger.version + 1
        if self.plan.overtakes:
            rng = Random(f"{self.plan.seed}:{self.name}:overtakes:{version}")
            earlier = OvertakenUpdate(client, self._cluster, self._ledger, rng)
            await earlier.run(version, partial(self._update, client, version + 1))
        else:
            await self._update(client, version)
        return self._ledger.version

    async def _update(self, client: RolloutClient, version: int) -> None:
        """Gives the service new weights, under the first free version from this one on."""
        while True:
            folder, content = f"w{version}", f"content-{version}"
            self._cluster.disk.folders[folder] = content
            self._ledger.offered.setdefault(version, set()).add(content)
            try:
                loaded = await client.update_weights(version, folder)
            except RayError:
                await asyncio.sleep(AGAIN_S)
                continue
            except WeightsRejected as refused:
                check_refused(refused, version)
                await asyncio.sleep(AGAIN_S)
                version = max(version, (await insisted(client.status, RayError)).weights_version + 1)
                continue
            if loaded.version != version:
                raise Wrong(f"update to {version} answered with {loaded.version}")
            check_loaded(self._cluster, loaded)
            self._ledger.version = version
            if not loaded.digest:
                self._ledger.unread.add(version)
            return

    async def _load_adapter(self, client: RolloutClient) -> None:
        """Gives the driver's adapter the content of this step."""
        content = f"{self.plan.name}-{self.done}"
        self._cluster.disk.folders[f"/{content}"] = content
        loaded = await insisted(lambda: client.load_adapter(self.plan.name, f"/{content}"), RayError, AdapterRejected)
        if loaded.digest != digest_of(content):
            raise Wrong(f"adapter {content} was loaded as {loaded.digest}")
