"""A driver whose samples have turns that come in time, late, twice, or before the previous turn has ended.

Laws: each turn's tokens are those of its key after its prompt. In a run without faults a sample is held from its answer
until its time is over, and no longer, whatever hold its earlier turns requested. Called by `run`.
"""

import asyncio
from random import Random

from tailrace.app.calls.refused import RolloutRejected, WeightsRejected
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.rollout import BatchSettings
from tailrace.deployments.messages.session import SampleAnswer
from tailrace.lab.fuzz.checks import Ledger, ResultChecks
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.token_law import token_at
from tailrace.lab.fuzz.worlds.patient import PatientSession
from tailrace.policies.core.sample_states import HELD
from tailrace.policies.protocol.actions import SampleEnd

BEGINS_S, UNTIL_S = 3.0, 50.0
TURNS, TOKENS, TOOL_TOKENS = 4, 40, 12
HOLDS_S = 0.0, 1.0, 3.0, 3.0, 20.0
SLACK_S = 1.5
"""Maximum seconds until the core has seen an end or the end of a hold, and from there to the driver's answer: a write
to a slow disk may delay a turn of its loop."""

GROUPS = 2


class OddTurns:
    """The driver. `calm`: whether the run has no fault. `rng`: used here alone."""

    def __init__(self, cluster: SimulatedCluster, ledger: Ledger, rng: Random, calm: bool):
        self._cluster, self._ledger, self._rng, self._calm = cluster, ledger, rng, calm
        self.name, self.ended = "turns", False
        self._checks = ResultChecks(cluster, ledger)
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        await asyncio.sleep(BEGINS_S)
        client, step = driver_client(self._cluster), 0
        while self._now() < UNTIL_S:
            opened = client.open(f"turns-{step}", seed=self._rng.randrange(100), step=step)
            tasks = [
                asyncio.ensure_future(
                    self._sample(PatientSession(opened), opened.settings, f"t{index % GROUPS}", index)
                )
                for index in range(self._rng.randint(1, 4))
            ]
            try:
                await asyncio.gather(*tasks)
            except (WeightsRejected, RolloutRejected) as error:
                if isinstance(error, RolloutRejected) and not self._ledger.policies_failed:
                    raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await opened.close()
            step += 1
        self.ended = True

    async def _sample(self, session: PatientSession, settings: BatchSettings, group: str, index: int) -> None:
        """Runs all turns of one sample."""
        await asyncio.sleep(self._rng.choice((0.0, 0.5, 3.0)))  # it joins a group whose mates run
        context = tuple(Random(f"{settings}{group}").randrange(1, 1000) for _ in range(20))
        for turn in range(TURNS):
            hold_s = self._rng.choice(HOLDS_S) if turn + 1 < TURNS else 0.0
            name = {"group": group, "index": index, "turn": turn}
            calls = [self._ask(session, context, settings, name, hold_s)]
            if self._rng.random() < 0.2:
                calls.append(self._again(session, context, settings, name, hold_s))
            if self._rng.random() < 0.2:
                guess = (*context, *self._guess(settings, name, context))
                calls.append(self._again(session, guess, settings, name | {"turn": turn + 1}, 0.0))
            answer, *more = await asyncio.gather(*calls)
            if answer.sample.finish_reason not in (SampleEnd.STOP, SampleEnd.LENGTH):
                return
            await self._hold(settings, index, hold_s, alone=not more)
            tool = self._rng.randrange(TOOL_TOKENS)
            context = (*context, *answer.sample.token_ids, *(self._rng.randrange(1, 1000) for _ in range(tool)))

    def _guess(self, settings: BatchSettings, name: dict, context: tuple[int, ...]) -> list[int]:
        """Returns the whole tokens of a turn that may not have ended, under the present weights."""
        key = sample_key(settings.seed, settings.step, name["group"], name["index"], name["turn"])
        content = next(iter(self._ledger.contents.get(self._ledger.version, {"start"})))
        mean = self._cluster.size.mean_tokens
        return [token_at(key, content, len(context) + place, mean) for place in range(TOKENS)]

    async def _ask(
        self, session: PatientSession, context: tuple[int, ...], settings: BatchSettings, name: dict, hold_s: float
    ) -> SampleAnswer:
        """Requests one turn, and checks its tokens. Returns the answer."""
        key = sample_key(settings.seed, settings.step, name["group"], name["index"], name["turn"])
        self._cluster.culprits.ask_again(key, context)
        answer = await session.generate(context, **name, max_tokens=TOKENS, hold_s=hold_s)
        where = f"{settings.batch_id}/{name}"
        if (answer.group, answer.sample.sample_index) != (name["group"], name["index"]):
            self._cluster.defects.append(f"{where} was answered by {answer.group}#{answer.sample.sample_index}")
        if tuple(answer.prompt_token_ids) != context:
            self._cluster.defects.append(f"{where} was answered for another prompt")
        self._checks.check_turn(key, context, TOKENS, answer.sample, where)
        return answer

    async def _again(self, session: PatientSession, context: tuple[int, ...], *about) -> SampleAnswer:
        """Requests a turn as `_ask` does, a little later."""
        await asyncio.sleep(self._rng.choice((0.0, 0.1, 1.0)))
        return await self._ask(session, context, *about)

    async def _hold(self, settings: BatchSettings, index: int, hold_s: float, alone: bool) -> None:
        """Waits for a while between two turns, and checks whether the sample is held. `alone`: whether the turn was
        requested once."""
        passes_s = hold_s * self._rng.choice((0.0, 0.5, 0.9)) if self._rng.random() < 0.7 else hold_s + 2 * SLACK_S
        await asyncio.sleep(passes_s)
        if not (self._calm and alone and hold_s):
            return
        is_held = index in self._held(settings.batch_id)
        if is_held and passes_s > hold_s + SLACK_S:
            self._cluster.defects.append(f"{settings.batch_id}#{index} is held {passes_s:.1f} s, asked for {hold_s} s")
        if not is_held and passes_s < hold_s - SLACK_S:
            self._cluster.defects.append(f"{settings.batch_id}#{index} is not held after {passes_s} of {hold_s} s")

    def _held(self, session: str) -> set[int]:
        """Returns the indexes of a session's samples that the core holds."""
        rollouts = self._cluster.coordinator.rollouts
        found = [one.sample_id for one in rollouts.core_holder.present.samples() if one.state is HELD]
        own = [name for name in found if name.partition("/")[0].rpartition("~")[0] == session]
        return {rollouts.batches.of(name).samples[name].index for name in own}
