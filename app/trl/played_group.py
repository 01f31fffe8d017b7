"""One task of an asynchronous trainer, from its row of the data set to the training rows of its trajectories.

Invariant: a sample is a row of a trajectory as the gateway captured it, and nothing is encoded or computed again. The
keys of its tokens come from the seed, the group's number and its place in the tree, never from the time.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

import numpy as np

from tailrace.app.errors import Failed
from tailrace.app.http.client import Client
from tailrace.app.http.trajectory import TrajectoryRow
from tailrace.app.http.trajectory_groups import EndedTrajectory, Play, TrajectoryGroup
from tailrace.app.trl.group_rewards import GroupRewards
from tailrace.app.trl.sampling import sampling_of
from tailrace.app.trl.scored_group import ScoredGroup, as_message, step_of
from tailrace.app.trl.unused_routes import warn_of_routes
from tailrace.deployments.messages.errors import one_line

LOGGER = logging.getLogger("tailrace")

NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties of a harness would make tokens of another distribution than the trainer computes."""


class GroupPlayer:
    """`play`: see `Client.trajectory_groups`; its task is the row. `args`: an `AsyncGRPOConfig`. `tokenizer`: the
    trainer's. `limits`: of each trajectory.
    """

    def __init__(self, client: Client, play: Play, *, args, tokenizer, limits: Mapping[str, float]):
        self._client, self._play, self._args, self._tokenizer = client, play, args, tokenizer
        sampling = sampling_of(args).model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        self._request = {"seed": args.seed, "sampling": sampling | NO_PENALTIES, "limits": dict(limits)}

    async def make(self, number: int, row: dict, version_of: Callable[[int], int]) -> ScoredGroup:
        """Makes a group, see `MakeGroup`. A trajectory whose harness raises an error has no samples, and is left out of
        the mean of rewards. Raises Failed if all of a group have done so, or if none has called the model.
        """
        began = time.monotonic()
        group = await self._played(number, row)
        seconds = time.monotonic() - began
        ended = [one for one in group.trajectories if one.error is None]
        for one in group.trajectories:
            if one.error is not None:
                LOGGER.warning("group %s, trajectory %s has no reward: %s", number, one.index, one_line(one.error))
        if not ended:
            error = group.trajectories[0].error
            raise Failed(f"group {number}: all trajectories have failed, the first one by {one_line(error)}") from error
        return await asyncio.to_thread(self._scored, number, ended, version_of, seconds)

    async def _played(self, number: int, row: dict) -> TrajectoryGroup:
        samples, step = self._args.num_generations, step_of(self._args, number)
        played = self._client.trajectory_groups(
            {str(number): row}, self._play, samples, at_once=samples, step=step, **self._request
        )
        async with aclosing(played) as groups:
            (group,) = [group async for group in groups]
        return group

    def _scored(
        self, number: int, ended: list[EndedTrajectory], version_of: Callable[[int], int], seconds: float
    ) -> ScoredGroup:
        from trl.trainer.utils import get_callable_name

        totals = [math.nan if one.rows.reward is None else one.rows.reward for one in ended]
        rewards = GroupRewards((get_callable_name(self._play),), np.array([totals], dtype=float))
        samples, newest = [], []
        warn_of_routes(row.routed_experts for one in ended for row in one.rows.rows)
        for one, advantage, metrics in zip(ended, rewards.advantages, rewards.metrics(), strict=True):
            for row in one.rows.rows:
                if not any(row.mask):
                    continue
                versions = [version_of(version) for version in _trained_versions(row)]
                given = {"advantage": float(advantage), "group_id": number, "metrics": dict(metrics)}
                samples.append(self._sample(row, model_version=min(versions), **given))
                newest.append(max(versions))
        if not samples:
            raise Failed(
                f"group {number}: no trajectory has called the model; play has to give its harness"
                " trajectory.base_url and trajectory.api_key"
            )
        return ScoredGroup(number, samples, newest, self._metrics(ended, len(samples), seconds))

    def _sample(self, row: TrajectoryRow, **values):
        """Returns TRL's `RolloutSample` of a row. Its messages are for people: all before the first trained token, and
        the rest, with the special tokens between turns.
        """
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        first = row.mask.index(1)
        return RolloutSample(
            prompt=as_message("user", self._tokenizer.decode(row.token_ids[:first])),
            completion=as_message("assistant", self._tokenizer.decode(row.token_ids[first:])),
            input_ids=np.array(row.token_ids, dtype=np.int64),
            completion_mask=np.array(row.mask, dtype=np.int64),
            old_log_probs=np.array(row.logprobs, dtype=np.float32),
            **values,
        )

    def _metrics(
        self, ended: list[EndedTrajectory], samples: int, seconds: float
    ) -> dict[str, float | tuple[float, float]]:
        """Returns a group's metrics, under TRL's names where it has one."""
        lengths = [one.rows.sampled_tokens for one in ended]
        count, asked = float(len(ended)), float(self._args.num_generations)
        return {
            "completions/mean_length": (float(sum(lengths)), count),
            "completions/max_length": float(max(lengths)),
            "completions/min_length": float(min(lengths)),
            "rollout/duration_s": seconds,
            "trajectories/turns": (float(sum(one.rows.turns for one in ended)), count),
            "trajectories/rows": (float(samples), count),
            "trajectories/reencoded_tokens": (float(sum(one.rows.reencoded_tokens for one in ended)), count),
            "trajectories/failed": (asked - count, asked),
        }


def _trained_versions(row: TrajectoryRow) -> set[int]:
    """Returns the versions of the weights that made tokens with the mask 1."""
    return {span.version for turn in row.turns for span in turn.weight_versions if any(row.mask[span.start : span.end])}
