"""A driver whose samples end early, at every moment from 0 ms on: by a cancel, by a deadline, or because their caller
leaves.

Laws: a sample ends as cancelled only after a cancel or its deadline, never before. In a run without faults it ends
within ENDS_S of it, and so does a sample that no caller waits for. Its tokens are the first tokens of the whole answer.
Called by `run`.
"""

import asyncio
from random import Random

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import QuotaExceeded, RolloutRejected, WeightsRejected
from tailrace.deployments.batches.records import SampleRecord
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, SampleResult
from tailrace.lab.fuzz.checks import Ledger, ResultChecks
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.worlds.patient import PatientSession
from tailrace.policies.core.sample_states import ENDED
from tailrace.policies.protocol.actions import SampleEnd

BEGINS_S, UNTIL_S = 3.0, 50.0
MOMENTS_S = 0.0, 0.0, 0.001, 0.02, 0.1, 0.4, 1.5, 6.0
ENDS_S = 6.0
"""Maximum seconds to an end: a turn of the loop with a write to a slow disk, a message, and a step of an engine."""

SAMPLES = 4
"""Number of samples that are requested at once."""

AGAIN_S = 0.01
"""Seconds until a cancel that came before its sample is repeated."""


class EarlyEnds:
    """The driver. `calm`: whether the run has no fault. `rng`: used here alone."""

    def __init__(self, cluster: SimulatedCluster, ledger: Ledger, rng: Random, calm: bool):
        self._cluster, self._ledger, self._rng = cluster, ledger, rng
        self._calm = calm and not cluster.size.quotas  # which make a sample wait
        self.name, self.ended = "early", False
        self._checks = ResultChecks(cluster, ledger)
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        await asyncio.sleep(BEGINS_S)
        client, step = driver_client(self._cluster), 0
        while self._now() < UNTIL_S:
            batch = self._batch(step)
            self._ledger.cancels.add(batch.batch_id)
            try:
                await (self._whole(client, batch) if self._rng.random() < 0.3 else self._singles(client, batch))
            except (WeightsRejected, RolloutRejected) as error:
                if not isinstance(error, QuotaExceeded | WeightsRejected) and not self._ledger.policies_failed:
                    raise
            step += 1
            await asyncio.sleep(self._rng.choice((0.0, 1.0, 4.0)))
        self.ended = True

    def _batch(self, step: int) -> RolloutBatch:
        prompt = tuple(self._rng.randrange(1, 1000) for _ in range(self._rng.randrange(1, 40)))
        most = self._rng.choice((4, 40, 200))
        group = PromptGroup(prompt_id="e", token_ids=prompt, samples=SAMPLES, max_tokens=most)
        return RolloutBatch(batch_id=f"early-{step}", groups=(group,), seed=self._rng.randrange(100), step=step)

    def _moment(self) -> float:
        return self._rng.choice(MOMENTS_S) * (0.5 + self._rng.random())

    # ---- whole batches -------------------------------------------------------------------------------

    async def _whole(self, client: RolloutClient, batch: RolloutBatch) -> None:
        """Rolls out a batch that is cancelled at some moment."""
        self._cluster.log_disk.begin(batch.batch_id)
        reading = asyncio.ensure_future(_groups(client, batch))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(self._moment())
        while not reading.done() and not await client.cancel(batch.batch_id):
            await asyncio.sleep(AGAIN_S)
        await self._in_time(reading, batch.batch_id, "a cancel")
        for group in await reading:
            for sample in group.samples:
                self._checks.check_sample(batch, batch.groups[0], sample, f"{batch.batch_id}#{sample.sample_index}")

    async def _in_time(self, task: asyncio.Future, name: str, cause: str) -> None:
        await asyncio.wait({task}, timeout=ENDS_S if self._calm else None)
        if not task.done():
            self._cluster.defects.append(f"{name} has not ended {ENDS_S:.0f} s after {cause}")
            await asyncio.wait({task})

    # ---- samples of a session ------------------------------------------------------------------------

    async def _singles(self, client: RolloutClient, batch: RolloutBatch) -> None:
        """Rolls out samples of a session, each with an end of its own."""
        opened = client.open(batch.batch_id, seed=batch.seed, step=batch.step)
        session = PatientSession(opened)
        ways = (self._by_cancel, self._by_deadline, self._by_leaving, self._by_one_of_two, self._by_itself)
        asks = [self._rng.choice(ways)(session, batch, index) for index in range(batch.groups[0].samples)]
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await opened.close()

    def _ask(self, session: PatientSession, batch: RolloutBatch, index: int, **more) -> asyncio.Task:
        group = batch.groups[0]
        self._cluster.culprits.ask_again(sample_key(batch.seed, batch.step, "e", index), group.token_ids)
        given = {"group": "e", "index": index, "max_tokens": group.max_tokens} | more
        task = asyncio.ensure_future(session.generate(group.token_ids, **given))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # not read if its reader has failed
        return task

    async def _checked(self, task: asyncio.Task, batch: RolloutBatch, index: int) -> SampleResult:
        sample = (await task).sample
        self._checks.check_sample(batch, batch.groups[0], sample, f"{batch.batch_id}#{index}")
        return sample

    async def _by_cancel(self, session: PatientSession, batch: RolloutBatch, index: int) -> None:
        task = self._ask(session, batch, index)
        await asyncio.sleep(self._moment())
        while not task.done() and not await session.cancel("e", index):
            await asyncio.sleep(AGAIN_S)
        await self._in_time(task, f"{batch.batch_id}#{index}", "a cancel")
        await self._checked(task, batch, index)

    async def _by_deadline(self, session: PatientSession, batch: RolloutBatch, index: int) -> None:
        deadline_s, began_s = max(1e-3, self._moment()), self._now()
        task = self._ask(session, batch, index, deadline_s=deadline_s)
        if self._calm:
            await asyncio.wait({task}, timeout=deadline_s)
        await self._in_time(task, f"{batch.batch_id}#{index}", "its deadline")
        sample = await self._checked(task, batch, index)
        if sample.finish_reason is SampleEnd.CANCELLED and self._now() < began_s + deadline_s:
            self._cluster.defects.append(f"{batch.batch_id}#{index} ended before its deadline of {deadline_s} s")

    async def _by_leaving(self, session: PatientSession, batch: RolloutBatch, index: int) -> None:
        task = self._ask(session, batch, index)
        await asyncio.sleep(self._moment())
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(ENDS_S)
        if not task.cancelled():
            return
        left = [name for name, sample in self._in_core(batch.batch_id) if sample.index == index]
        if left and self._calm:
            self._cluster.defects.append(f"{left[0]} runs {ENDS_S:.0f} s after its caller has left")
        sample = await self._checked(self._ask(session, batch, index), batch, index)
        self._not_cut(sample, batch, index)

    async def _by_one_of_two(self, session: PatientSession, batch: RolloutBatch, index: int) -> None:
        """Makes two calls for one sample. The caller with a deadline leaves before it; the other one gets the whole
        sample."""
        moment_s = self._moment()
        first = self._ask(session, batch, index, deadline_s=moment_s + 0.5)
        other = self._ask(session, batch, index)
        await asyncio.sleep(moment_s)
        is_early = not first.done()
        first.cancel()
        sample = await self._checked(other, batch, index)
        if is_early:
            self._not_cut(sample, batch, index)

    def _in_core(self, session: str) -> list[tuple[str, SampleRecord]]:
        """Returns the samples of a session that have not ended, with their records."""
        rollouts = self._cluster.coordinator.rollouts
        batches = [one for one in rollouts.batches.all() if one.message.batch_id == session]
        known = {name: record for batch in batches for name, record in batch.samples.items()}
        core = {one.sample_id: one.state for one in rollouts.core_holder.present.samples()}
        return [(name, record) for name, record in known.items() if core.get(name, ENDED) is not ENDED]

    async def _by_itself(self, session: PatientSession, batch: RolloutBatch, index: int) -> None:
        self._not_cut(await self._checked(self._ask(session, batch, index), batch, index), batch, index)

    def _not_cut(self, sample: SampleResult, batch: RolloutBatch, index: int) -> None:
        if sample.finish_reason is SampleEnd.CANCELLED:
            self._cluster.defects.append(f"{batch.batch_id}#{index} was cancelled without a request")


async def _groups(client: RolloutClient, batch: RolloutBatch) -> list:
    return [group async for group in client.rollout(batch)]
