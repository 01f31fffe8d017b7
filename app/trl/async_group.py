"""One prompt of an asynchronous trainer, from its row of the data set to its samples with advantages.

Invariant: each group is a separate batch, so it is generated, scored and delivered independently of others. The keys of
its tokens come from the seed and its number, never from the time. Called by `async_worker`.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from uuid import uuid4

import numpy as np

from tailrace.app.calls.client import RolloutClient
from tailrace.app.errors import BadInput
from tailrace.app.trl.group_rewards import rewards_of
from tailrace.app.trl.sampling import sampling_of
from tailrace.app.trl.scored_group import ScoredGroup, as_message, step_of
from tailrace.app.trl.step_rollout import check_answered
from tailrace.app.trl.unused_routes import warn_of_routes
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch, SampleResult
from tailrace.policies.protocol.actions import SampleEnd

NO_COLUMNS = {"prompt", "completion", "completion_ids"}
"""Columns of the data set that are not passed to reward functions, which get the samples' own."""


class GroupMaker:
    """`args`: a `trl.experimental.async_grpo.AsyncGRPOConfig`. `tokenizer`: the trainer's."""

    def __init__(self, client: RolloutClient, *, args, tokenizer, reward_funcs: Sequence[Callable]):
        self._client, self._args, self._tokenizer = client, args, tokenizer
        self._functions = list(reward_funcs)
        self._sampling = sampling_of(args)
        self._run = f"{os.getpid()}-{uuid4().hex[:6]}"

    async def make(self, number: int, row: dict, version_of: Callable[[int], int]) -> ScoredGroup:
        """Makes a group, see `MakeGroup`."""
        began = time.monotonic()
        if "prompt" not in row:
            raise BadInput(f"the data set has the columns {', '.join(row)}; it needs one called prompt")
        prompt = row["prompt"]
        group = await self._generated(number, prompt)
        ended = time.monotonic()
        texts = [self._tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in group.samples]
        columns = {name: [value] * len(texts) for name, value in row.items() if name not in NO_COLUMNS}
        columns["prompts"] = [prompt] * len(texts)
        columns["completions"] = texts if isinstance(prompt, str) else [as_message("assistant", text) for text in texts]
        columns["completion_ids"] = [list(sample.token_ids) for sample in group.samples]
        rewards = await rewards_of(self._functions, len(texts), columns)
        known = {index: float(total) for index, total in enumerate(rewards.totals) if np.isfinite(total)}
        if known:
            await self._client.record_rewards(group, known)
        versions = [[version_of(part.weights_version) for part in sample.segments] for sample in group.samples]
        samples = [
            rollout_sample(
                group.prompt_token_ids,
                sample,
                prompt=as_message("user", prompt) if isinstance(prompt, str) else prompt,
                completion=as_message("assistant", text),
                advantage=float(advantage),
                model_version=min(of_sample),
                group_id=number,
                metrics=metrics,
            )
            for sample, text, advantage, of_sample, metrics in zip(
                group.samples, texts, rewards.advantages, versions, rewards.metrics(), strict=True
            )
        ]
        metrics = _metrics(group, ended - began, time.monotonic() - ended)
        return ScoredGroup(number, samples, list(map(max, versions)), metrics)

    async def _generated(self, number: int, prompt) -> GroupResult:
        wanted = PromptGroup(
            prompt_id=number,
            token_ids=tuple(self._token_ids(prompt)),
            samples=self._args.num_generations,
            max_tokens=self._args.max_completion_length,
            sampling=self._sampling,
        )
        batch = RolloutBatch(
            batch_id=f"trl-async-{self._run}-{number}",
            groups=(wanted,),
            step=step_of(self._args, number),
            seed=self._args.seed,
        )
        async with aclosing(self._client.rollout(batch)) as groups:
            (group,) = [group async for group in groups]
        check_answered(group)
        warn_of_routes(sample.routed_experts for sample in group.samples)
        return group

    def _token_ids(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer(text=prompt)["input_ids"]
        if not all(isinstance(message["content"], str) for message in prompt):
            raise BadInput("prompts with images or parts: the service takes text alone")
        return self._tokenizer.apply_chat_template(
            prompt, return_dict=False, add_generation_prompt=True, **(self._args.chat_template_kwargs or {})
        )


def rollout_sample(prompt_token_ids: Sequence[int], sample: SampleResult, **values):
    """Returns TRL's `RolloutSample`: `input_ids`, `completion_mask` and `old_log_probs` cover prompt and answer."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    before, after = len(prompt_token_ids), len(sample.token_ids)
    return RolloutSample(
        input_ids=np.array([*prompt_token_ids, *sample.token_ids], dtype=np.int64),
        completion_mask=np.array([0] * before + [1] * after, dtype=np.int64),
        old_log_probs=np.array([0.0] * before + list(sample.logprobs), dtype=np.float32),
        **values,
    )


def _metrics(group: GroupResult, rollout_s: float, score_s: float) -> dict[str, float | tuple[float, float]]:
    """Returns a group's metrics under TRL's names."""
    lengths = [len(sample.token_ids) for sample in group.samples]
    cut = sum(sample.finish_reason is SampleEnd.LENGTH for sample in group.samples)
    return {
        "completions/mean_length": (float(sum(lengths)), float(len(lengths))),
        "completions/clipped_ratio": (float(cut), float(len(lengths))),
        "completions/max_length": float(max(lengths)),
        "completions/min_length": float(min(lengths)),
        "rollout/duration_s": rollout_s,
        "rollout/score_s": score_s,
    }
