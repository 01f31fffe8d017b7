"""`ChunkRunner` over a scripted engine client: one event for every chunk, whatever the call raises."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from tailrace.deployments.coordinator.chunk_runner import ChunkRunner
from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.deployments.messages.errors import ChunkError, ReplicaLost
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.families.drafting import NoDrafting
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.events import ChunkEnd, ChunkFailed, ChunkFinished, ReplicaLeft


class Engines:
    """Answers a chunk with a value, or raises it if it is an error."""

    def __init__(self, answer):
        self.answer = answer

    async def generate(self, replica_id, chunk):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Batch:
    """One sample; `request` fails if told to, as a bug in it would."""

    submitted_s = 0.0

    def __init__(self, bug: bool = False):
        self.written = []
        self.samples = {"g#0": SimpleNamespace(started_s=None, append=lambda *what: self.written.append(what))}
        self.bug = bug

    def chunk_span(self, telemetry, start):
        return telemetry.span("chunk", None)

    def request(self, sample, start, span, drafting):
        if self.bug:
            raise KeyError("no such prompt")
        return "request"


START = StartChunk(
    chunk_id="g#0/1", sample_id="g#0", replica_id="r", start=0, max_tokens=4, weights_version=0, kv_version=0,
    min_pull_tokens=None, expected_tokens=4, class_starts=(1, 2), reason="a test",
)  # fmt: skip
RESULT = ChunkResult(
    chunk_id="g#0/1", token_ids=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32),
    raw_logprobs=np.zeros(3, np.float32), end=ChunkEnd.LENGTH, weights_version=0, queue_s=0.0, prefill_s=0.0,
    decode_s=0.0, cached_tokens=0, computed_tokens=0,
)  # fmt: skip


def ran(answer, batch: Batch):
    runner = ChunkRunner(Engines(answer), Telemetry("test", False), lambda: 7.0)
    return asyncio.run(runner.run(START, batch, NoDrafting()))


def test_a_result_is_a_finished_chunk_and_writes_its_tokens_down():
    batch = Batch()
    event, write = ran(RESULT, batch)
    assert isinstance(event, ChunkFinished) and (event.now, event.new_tokens) == (7.0, 3)
    write()
    assert batch.written == [(0, RESULT, "r")]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ReplicaLost("gone"), ReplicaLeft),
        (ChunkError("refused"), ChunkFailed),
        (RuntimeError("of a kind that nobody expected"), ChunkFailed),
        (None, ChunkFailed),
    ],
    ids=["lost", "failed", "unexpected", "ill-formed"],
)
def test_every_failure_is_one_event_with_its_reason(answer, kind):
    event, write = ran(answer, Batch())
    assert isinstance(event, kind) and event.error and write is None


def test_a_bug_before_the_call_fails_the_chunk_alone():
    event, write = ran(RESULT, Batch(bug=True))
    assert isinstance(event, ChunkFailed) and "no such prompt" in event.error and write is None
