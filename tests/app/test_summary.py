"""The tail is the time spent on the last 10 % of samples to finish."""

import asyncio
from types import SimpleNamespace

from tailrace.app.commands.rollout import _drive
from tailrace.app.summary import quantile, summarise
from tailrace.deployments.messages.rollout import (
    GroupResult,
    PromptGroup,
    RolloutBatch,
    SampleResult,
    Segment,
    Timings,
)
from tailrace.policies.protocol.actions import SampleEnd


def sample(index: int, finished_s: float, replicas: tuple[str, ...] = ("r1",), chunks: int = 1) -> SampleResult:
    segments = tuple(
        Segment(weights_version=0, replica_id=name, start=10 * i, end=10 * (i + 1)) for i, name in enumerate(replicas)
    )
    tokens = 10 * len(replicas)
    return SampleResult(
        sample_index=index, token_ids=(1,) * tokens, text="", logprobs=(0.0,) * tokens, raw_logprobs=(0.0,) * tokens,
        finish_reason=SampleEnd.STOP, chunks=chunks, segments=segments, timings=Timings(finished_s=finished_s),
    )  # fmt: skip


def test_quantile_is_the_least_value_that_a_share_does_not_exceed():
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert quantile(values, 0.9) == 9.0
    assert quantile(values, 1.0) == 10.0
    assert quantile([4.0], 0.9) == 4.0


def test_makespan_tail_and_moves():
    samples = [sample(i, float(i + 1)) for i in range(9)]
    samples.append(sample(9, 29.0, replicas=("r1", "r2"), chunks=2))
    group = GroupResult(batch_id="b", prompt_id="p", prompt_token_ids=(1,), samples=tuple(samples))
    summary = summarise([group])
    assert summary["makespan_s"] == 29.0
    assert summary["tail_s"] == 20.0
    assert summary["tokens"] == 110 and summary["tokens_by_replica"] == {"r1": 100, "r2": 10}
    assert summary["moved_samples"] == 1 and summary["chunked_share"] == 0.1


def made(prompt_id: str, *finished_s: float) -> GroupResult:
    samples = tuple(sample(index, at_s) for index, at_s in enumerate(finished_s))
    return GroupResult(batch_id="b", prompt_id=prompt_id, prompt_token_ids=(1,), samples=samples)


def test_times_after_a_lost_coordinator_count_from_the_first_submission():
    """The new one was given the second group 22 s after the first submission."""
    before, after = made("p", *range(1, 10)), made("q", *range(78, 87), 95)
    summary = summarise([before, after], [9.0, 117.0])
    assert summary["makespan_s"] == 117.0 and summary["tail_s"] == 117.0 - 108.0
    assert summary["tokens_per_s"] == round(190 / 117.0, 1)


def test_a_rollout_has_the_time_of_arrival_of_each_group():
    class Client:
        async def status(self):
            return SimpleNamespace(weights_digest="", batches=())

        async def rollout(self, batch):
            for name in ("p", "q"):
                await asyncio.sleep(0.05)
                yield made(name, 0.0)

    groups = tuple(PromptGroup(prompt_id=name, token_ids=(1,), samples=1) for name in ("p", "q"))
    results = SimpleNamespace(check_weights=lambda digest: None, append=lambda *_: None)
    done = asyncio.run(_drive(Client(), RolloutBatch(batch_id="b", groups=groups), results, None))
    assert [one.prompt_id for one in done[0]] == ["p", "q"] and done[2] == []
    assert done[1][0] >= 0.05 and done[1][1] >= 0.1


def test_nothing_done_is_no_error():
    assert summarise([]) == {"groups": 0, "samples": 0}
