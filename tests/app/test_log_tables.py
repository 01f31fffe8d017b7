"""`tailrace logs`: tables of a sample's log and of a batch's; a name that is not known is an error of one line."""

import json
import sys
from types import SimpleNamespace

import pytest
from test_watch import shown

from tailrace.app.cli import run
from tailrace.app.watch.log_tables import batch_view, sample_view
from tailrace.deployments.messages.status import BatchLog, BatchStatus, ChunkLog, FaultLog, SampleLog


def chunk(number: int, replica: str, **said) -> ChunkLog:
    usual = {
        "began_s": 10.0,
        "ended_s": 12.5,
        "start": 50 * number,
        "new_tokens": 50,
        "reason": f"because of {replica}",
    }
    usual |= {"end": "length", "asked": "", "error": "", "copy_of": None, "method": None}
    return ChunkLog(chunk_id=f"b~1/sky#0:{number}", replica_id=replica, **(usual | said))


def sample(*chunks: ChunkLog, **said) -> SampleLog:
    usual = {"state": "running", "end": "", "why": "stays", "error": "", "tokens": 120, "expected_tokens": 400}
    usual |= {"max_tokens": 1_000, "moves": 1, "dropped": 0}
    return SampleLog(sample_id="b~1/sky#0", chunks=chunks, **(usual | said))


def batch(*samples: SampleLog, **said) -> BatchLog:
    usual = {"status": None, "counts": {"stop": 3, "failed": 1}, "chunks": 9, "moves": 2, "faults": ()}
    return BatchLog(batch_id="b~1", samples=samples, **(usual | said))


def test_a_sample_s_chunks_are_rows_with_reasons_races_and_errors():
    log = sample(
        chunk(0, "r1"),
        chunk(1, "r2", end="failed", error="[out] of memory", new_tokens=0),
        chunk(2, "r1", ended_s=None, end="", asked="weights 2 replace 1", copy_of="b~1/sky#0:1", method="suffix"),
    )
    text = shown(sample_view(log, 20.0))
    for part in ("running: stays; 120 tokens of about 400, 1,000 at most; 3 chunks, 1 moves", "because of r1",
                 "[out] of memory", "asked to stop: weights 2 replace 1", "races b~1/sky#0:1 with suffix"):  # fmt: skip
        assert part in text, part
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["1", "2", "3"] and " 10.0 " in text


def test_a_batch_shows_its_ends_faults_and_samples():
    fault = FaultLog(number=1, at_s=5.0, sample_id="b~1/sky#0", replica_id="r2", text="out of memory")
    text = shown(batch_view(batch(sample(end="failed", error="given up"), faults=(fault,)), 20.0))
    for part in ("over; 1 failed, 3 stop; 9 chunks, 2 moves", "out of memory", "given up"):
        assert part in text, part
    status = BatchStatus(batch_id="b", samples=4, ended=3, groups=2, emitted=1, tokens=900, tail=True, seconds=7.0)
    text = shown(batch_view(batch(status=status), 20.0))
    assert "1 of 2 groups handed out, 900 tokens; 7 s, in its tail" in text and "over" not in text


class Known:
    """A client that knows one sample and one batch."""

    async def sample_log(self, name: str) -> SampleLog | None:
        return sample(chunk(0, "r1")) if name == "b/sky#0" else None

    async def batch_log(self, name: str) -> BatchLog | None:
        return batch(sample()) if name == "run#1" else None


@pytest.fixture
def known(monkeypatch):
    cluster = SimpleNamespace(connect=lambda address, role: Known())
    monkeypatch.setitem(sys.modules, "tailrace.app.cluster", cluster)


def test_json_is_the_whole_log(known, capsys):
    assert run(["logs", "b/sky#0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == sample(chunk(0, "r1")).model_dump(mode="json")


def test_a_batch_may_be_named_as_samples_are(known, capsys):
    """It was looked for among the samples alone."""
    assert run(["logs", "run#1"]) == 0
    assert "over; 1 failed, 3 stop; 9 chunks" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "kind"), [("b/sky#1", "sample"), ("b", "batch")])
def test_an_unknown_name_is_an_error_of_one_line(name, kind, known, capsys):
    assert run(["logs", name]) == 2
    assert f"error: no {kind} '{name}' is known" in capsys.readouterr().err
