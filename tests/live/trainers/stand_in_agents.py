"""Trajectories in this process: the gateway's tree and rows, and a Hugging Face model that draws by sample keys.

A harness asks by `turn(text)`, which goes on from the last answer, or by `aside(text)`, a branch after the first one.
"""

import asyncio
from types import SimpleNamespace
from uuid import uuid4

from live.trainers.stand_in import StandIn

from tailrace.app.gateway.trajectories.rows import trajectory_body
from tailrace.app.gateway.trajectories.tree import TrajectoryTree
from tailrace.app.http.trajectory import TrajectoryRows
from tailrace.app.http.trajectory_groups import played_groups
from tailrace.deployments.messages.rollout import BatchSettings, PromptGroup, SamplingParams
from tailrace.deployments.messages.trajectory import (
    TrajectoryLimits,
    TrajectoryOpening,
    TrajectorySampling,
    TrajectoryTurn,
)


class AgentsStandIn(StandIn):
    """`opened`: all trajectories, in the order of their opening. `groups`: those that have ended, by name."""

    def __init__(self, model):
        super().__init__(model)
        self.opened, self.groups = [], {}

    async def trajectory_groups(self, tasks, play, samples, at_once, **request):
        async def opened(group: str, index: int) -> StandInTrajectory:
            self.opened.append(StandInTrajectory(self, group, index, request))
            return self.opened[-1]

        async for group in played_groups(opened, tasks, play, samples, at_once):
            self.groups[group.group] = group
            yield group


class StandInTrajectory:
    """`request`: as of `POST /v1/trajectories`."""

    def __init__(self, service: AgentsStandIn, group: str, index: int, request: dict):
        self.service, self.request = service, request
        opening = TrajectoryOpening(
            trajectory_id=uuid4().hex,
            key_digest="0",
            settings=BatchSettings(batch_id="stand-in", seed=request["seed"], step=request["step"]),
            group=group,
            index=index,
            limits=TrajectoryLimits(**request["limits"]),
            sampling=TrajectorySampling(**request["sampling"]),
        )
        self.tree, self.has_ended, self.given = TrajectoryTree(opening, "here"), False, None
        self._last: int | None = None  # the turn that the next one goes on from

    async def turn(self, text: str, max_tokens: int = 4) -> str:
        before = [] if self._last is None else self.tree.context(self._last).tolist()
        self._last, said = await self._answer(before, text, max_tokens)
        return said

    async def aside(self, text: str, max_tokens: int = 4) -> str:
        first = self.tree.turns[0]
        _, said = await self._answer([*first.prompt_token_ids, *first.token_ids], text, max_tokens)
        return said

    async def _answer(self, before: list[int], text: str, max_tokens: int) -> tuple[int, str]:
        prompt = before + self.service.tokenizer(text)["input_ids"]
        begun, opening = self.tree.begin(prompt, ()), self.tree.opening
        sampling = opening.sampling.over(SamplingParams(temperature=0.0))  # a harness's own
        named = PromptGroup(
            prompt_id=f"{opening.group}/{begun.turn}", token_ids=prompt, samples=1, max_tokens=max_tokens,
            sampling=sampling,
        )  # fmt: skip

        def sampled():
            with self.service.lock:
                return self.service._sample(SimpleNamespace(**dict(opening.settings)), named, opening.index)

        sample = await asyncio.to_thread(sampled)
        turn = TrajectoryTurn(
            parent=begun.parent, turn=begun.turn, conversation=b"", message=b"", closing=None,
            prompt_token_ids=begun.prompt.tolist(), token_ids=sample.token_ids, logprobs=sample.logprobs,
            versions=tuple((part.weights_version, part.start, part.end) for part in sample.segments),
            finish_reason=sample.finish_reason, reencoded_tokens=0, prompt_key="key",
        )  # fmt: skip
        self.tree.add([turn])
        return len(self.tree.turns) - 1, sample.text

    async def reward(self, reward: float) -> TrajectoryRows:
        self.given = reward
        return self._end(reward)

    async def close(self) -> TrajectoryRows | None:
        return None if self.has_ended else self._end(None)

    def _end(self, reward: float | None) -> TrajectoryRows:
        if self.has_ended:
            raise ValueError("the trajectory has ended")
        self.has_ended = True
        return TrajectoryRows.model_validate(trajectory_body(self.tree, reward))
