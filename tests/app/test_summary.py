"""The tail is the time spent on the last 10 % of samples to finish."""

from tailrace.app.summary import quantile, summarise
from tailrace.deployments.messages.rollout import GroupResult, SampleResult, Segment, Timings
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


def test_nothing_done_is_no_error():
    assert summarise([]) == {"groups": 0, "samples": 0}
