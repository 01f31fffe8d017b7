"""Every `StartChunk` gives one event, whatever the engine client does."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from performances import performance

from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.coordinator.chunk_runner import ChunkRunner
from tailrace.deployments.coordinator.loop import Loop
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.feed.acceptance import Acceptance
from tailrace.deployments.messages.chunk import ChunkResult, EngineStats
from tailrace.deployments.messages.drafts import DraftReport
from tailrace.deployments.messages.errors import ChunkError, ReplicaLost, SampleRefused
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.metrics.totals import EndTotals
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import AbortChunk, StartChunk
from tailrace.policies.protocol.events import ChunkEnd, ChunkFailed, ChunkFinished, ReplicaLeft

NOW_S = 12.5
RESULT = ChunkResult(
    chunk_id="b/p#0@0", token_ids=np.array([4, 5], np.int32), logprobs=np.full(2, -1.0, np.float32),
    raw_logprobs=np.full(2, -2.0, np.float32), end=ChunkEnd.LENGTH, weights_version=3, queue_s=0.5, prefill_s=1.0,
    decode_s=2.0, cached_tokens=0, computed_tokens=3, stored_tokens=4, drafted_tokens=7, accepted_tokens=1,
    verifications=2, pulled_tokens=5,
)  # fmt: skip
START = StartChunk(
    chunk_id="b/p#0@0", sample_id="b/p#0", replica_id="r1", start=0, max_tokens=2, weights_version=3, kv_version=3,
    min_pull_tokens=None, expected_tokens=8, class_starts=(4, 8), reason="first",
)  # fmt: skip


class Script:
    """An engine client that gives one answer to every call: a result, or an exception that it raises."""

    def __init__(self, answer):
        self._answer = answer

    async def generate(self, replica_id, chunk):
        assert (replica_id, chunk.chunk_id) == ("r1", START.chunk_id)
        return await self._say()

    async def abort(self, replica_id, chunk_id, keep_kv):
        await self._say()

    async def _say(self):
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


def batch() -> LiveBatch:
    group = PromptGroup(prompt_id="p", token_ids=(1, 2, 3), samples=1, max_tokens=8)
    message = RolloutBatch(batch_id="b", groups=(group,), keep_trace=True)
    made = LiveBatch(
        message=message, core_id="b", delivery=None, prepared=[Prepared(group, (1, 2, 3), 8, "key")], past={},
        submitted_s=10.0,
    )  # fmt: skip
    made.open_spans(Telemetry("test"), "model")
    return made


class ClockLoop(Loop):
    """The coordinator's loop with a clock of its own: `clock[0]`, in seconds."""

    def __init__(self, clock):
        super().__init__(asyncio.Event())
        self._given = clock

    def now(self):
        return self._given[0]


def runner_of(engines, clock=(NOW_S,)) -> ChunkRunner:
    totals = EndTotals()
    return ChunkRunner(ClockLoop(clock), engines, ReplicaRegistry(), {3: "digest"}, totals, Acceptance())


def run(answer, of: LiveBatch | None = None):
    async def once():
        return await runner_of(Script(answer)).run(START, of or batch(), Policies().drafting)

    return asyncio.run(once())


def write(made) -> None:
    """Appends the tokens to their sample, as the coordinator's loop does."""
    made.sample.append(made.start.start, made.result, made.start.replica_id, *made.digests)


def test_a_result_is_an_event_and_its_tokens_are_written_when_asked():
    of = batch()
    event, made = run(RESULT, of)
    assert event == ChunkFinished(
        now=NOW_S, chunk_id=START.chunk_id, new_tokens=2, end=ChunkEnd.LENGTH, weights_version=3, stored_tokens=4,
        drafted_tokens=7, accepted_tokens=1, computed_tokens=3, verifications=2, pulled_tokens=5,
    )  # fmt: skip
    sample = of.samples["b/p#0"]
    assert sample.tokens == 0 and sample.started_s == 2.5
    write(made)
    assert sample.tokens == 2


def test_the_drafts_of_a_result_are_those_of_its_event():
    drafts = DraftReport(2, np.full(6, 1), np.full(6, 1), np.array([1]), model_tested=6, model_accepted=4, tested=9)
    event, _ = run(replace(RESULT, drafts=drafts))
    assert (event.model_tested, event.model_accepted, event.tested_tokens) == (6, 4, 7), "no more than were drafted"


@pytest.mark.parametrize(
    ("answer", "event"),
    [
        (ReplicaLost("gone"), ReplicaLeft(NOW_S, "r1", "gone")),
        (ChunkError("refused"), ChunkFailed(NOW_S, START.chunk_id, "refused")),
        (SampleRefused("bad"), ChunkFailed(NOW_S, START.chunk_id, "no engine can run it: bad", of_sample=True)),
        (
            SampleRefused(f"RequestRefused: chunk {START.chunk_id}: top_k is odd"),
            ChunkFailed(NOW_S, START.chunk_id, "no engine can run it: top_k is odd", of_sample=True),
        ),
        (KeyError("a bug"), ChunkFailed(NOW_S, START.chunk_id, "KeyError: 'a bug'")),
        (ZeroDivisionError(), ChunkFailed(NOW_S, START.chunk_id, "ZeroDivisionError: no message")),
    ],
)
def test_an_exception_is_an_event_too(answer, event):
    assert run(answer) == (event, None)


def test_an_answer_that_is_no_result_fails_the_chunk():
    event, made = run("not a ChunkResult")
    assert isinstance(event, ChunkFailed) and made is None


def test_a_request_that_cannot_be_made_fails_the_chunk():
    of = batch()
    of.samples.clear()
    event, made = run(RESULT, of)
    assert event == ChunkFailed(NOW_S, START.chunk_id, "KeyError: 'b/p#0'") and made is None


def test_a_cancelled_call_stays_cancelled():
    """The coordinator ends: nothing is left to report to."""

    class Slow:
        async def generate(self, replica_id, chunk):
            await asyncio.sleep(60.0)

    async def cancelled():
        runner = runner_of(Slow())
        running = asyncio.ensure_future(runner.run(START, batch(), Policies().drafting))
        await asyncio.sleep(0)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_call_that_serve_has_cancelled_fails_the_chunk():
    """Serve raises CancelledError for a callee whose task was cancelled; nobody has cancelled this one."""
    event, made = run(asyncio.CancelledError())
    assert event == ChunkFailed(NOW_S, START.chunk_id, "CancelledError: no message") and made is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"chunk_id": "b/p#0@1"}, "it is of b/p#0@1"),
        ({"weights_version": 4}, "weights 4 made it, not 3"),
        ({"token_ids": np.arange(3, dtype=np.int32)}, "3 tokens, asked for at most 2"),
        ({"logprobs": np.zeros(1, np.float32)}, "2 tokens, 1 and 2 logprobs"),
        ({"token_ids": np.array([4, -1], np.int32)}, "token -1"),
        ({"raw_logprobs": np.array([0, np.nan], np.float32)}, "a logprob is not a number"),
    ],
)
def test_an_impossible_result_fails_the_chunk(changes, problem):
    event, made = run(replace(RESULT, **changes))
    assert isinstance(event, ChunkFailed) and problem in event.error and made is None


def test_the_segment_names_the_content_of_the_weights():
    of = batch()
    _, made = run(RESULT, of)
    write(made)
    (segment,) = of.samples["b/p#0"].segments
    assert (segment.weights_version, segment.weights_digest) == (3, "digest")


@pytest.mark.parametrize("answer", [ReplicaLost("gone"), ChunkError("refused"), None])
def test_an_abort_that_comes_too_late_is_no_error(answer):
    async def aborted():
        runner = runner_of(Script(answer))
        runner.abort(AbortChunk(START.chunk_id, "r1", False, "test"))
        (task,) = runner._loop.tasks
        return await task

    assert asyncio.run(aborted()) is None


class Silent:
    """An engine client whose replica never answers a chunk."""

    async def generate(self, replica_id, chunk):
        await asyncio.Event().wait()


def watched(reports, step_s=4.0) -> tuple[list, int]:
    """A chunk's events while polls bring these reports, `step_s` seconds apart; and the calls left in the books."""

    async def play():
        clock = [0.0]
        runner = runner_of(Silent(), clock)
        run = asyncio.ensure_future(runner.run(START, batch(), Policies().drafting))
        for report in reports:
            await asyncio.sleep(0)
            clock[0] += step_s
            runner.watch.look([report])
        for _ in range(3):
            await asyncio.sleep(0)
        if not run.done():
            run.cancel()
        return [one for one in await asyncio.gather(run, return_exceptions=True) if isinstance(one, tuple)], len(
            runner.watch
        )

    return asyncio.run(play())


def report(turn: int, **fields) -> EngineStats:
    return EngineStats(
        **{
            "replica_id": "r1", "weights_version": 3, "block_tokens": 16, "kv_capacity_blocks": 100, "max_running": 4,
            "max_model_len": 512, "draft_tokens": 0, "observed_at": float(turn + 1),
        } | fields
    )  # fmt: skip


POLLS = 200
"""At 4 s each: longer than STALLED_S."""


@pytest.mark.parametrize("running", [{}, {START.chunk_id: 0}, {START.chunk_id: 7}])
def test_a_chunk_without_progress_on_a_replica_that_answers_fails(running):
    ((event, made),), left = watched(report(turn, running=running) for turn in range(POLLS))
    assert isinstance(event, ChunkFailed) and made is None and left == 0
    assert event.error == f"chunk {START.chunk_id}: r1 answers, but made no token of it in 608 s"


@pytest.mark.parametrize(
    "fields",
    [
        lambda turn: {"running": {START.chunk_id: turn // 100}},  # a token in 400 s
        lambda turn: {"observed_at": 1.0},  # one step, or a load of weights
        lambda turn: {"replica_id": "r2"},
        lambda turn: {"performance": performance(prefill=2.0)},  # its cache of 1600 tokens takes 800 s, three times
    ],
)
def test_a_chunk_of_a_slow_or_busy_replica_goes_on(fields):
    assert watched(report(turn, **fields(turn)) for turn in range(POLLS)) == ([], 0)


def test_one_poll_counts_for_seconds_alone():
    assert watched((report(turn) for turn in range(100)), step_s=1000.0) == ([], 0)


def test_a_chunk_s_event_comes_with_a_turn_and_its_call_is_forgotten():
    async def started(answer):
        runner, of = runner_of(Script(answer)), batch()
        runner._registry.joined["r1"] = None
        runner.start(START, of, Policies().drafting)
        assert list(runner.calls) == [START.chunk_id]
        await asyncio.gather(*runner.calls.values())
        await asyncio.sleep(0)
        assert not runner.calls and not runner._loop.tasks
        ((event, made),) = runner._loop.take()
        return event, made, "r1" in runner._registry.joined

    event, made, is_here = asyncio.run(started(RESULT))
    assert isinstance(event, ChunkFinished) and made.result is RESULT and is_here
    event, made, is_here = asyncio.run(started(ReplicaLost("gone")))
    assert isinstance(event, ReplicaLeft) and made is None and not is_here
