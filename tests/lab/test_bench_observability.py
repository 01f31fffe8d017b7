"""Parts of `bench observability` that need no Ray: the cost of spans, counting and windows."""

import json
import subprocess
import sys

import pytest
from test_metrics import batch, result

from tailrace.app.cli import run
from tailrace.deployments.metrics.totals import EndTotals
from tailrace.lab.benchmarks.observability.totals import NoTotals, TimedTotals
from tailrace.lab.benchmarks.observability.tracing_cost import collector
from tailrace.lab.benchmarks.observability.windows import WINDOW_S, QuietWindow, costs
from tailrace.policies.protocol.actions import SampleEnd

PROGRAM = """
import json
from tailrace.lab.benchmarks.observability.tracing_cost import TracingCost
from tailrace.deployments.batches.batch_spans import BatchSpans
from tailrace.deployments.messages.rollout import BatchSettings
from tailrace.deployments.telemetry import Telemetry

cost = TracingCost()
off, on = Telemetry("off"), Telemetry("on", otlp=True, every_group=True)
found = []
for telemetry in (off, on):
    spans = BatchSpans(telemetry, BatchSettings(batch_id="b"), "demo")
    for number in range(50):
        spans.open_group(str(number), "p")
        spans.close_group(str(number), [])
    spans.close()
    found.append((cost.spans, cost.worked_s))
on.close()
print(json.dumps([*found, cost.exported_s]))
"""


@pytest.mark.slow
def test_calls_without_a_span_cost_nothing_and_exports_are_counted():
    with collector():
        said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    (off_spans, off_s), (on_spans, on_s), exported_s = json.loads(said.stdout)
    assert (off_spans, on_spans) == (0, 51) and off_s == 0 < on_s and exported_s > 0


def told(totals: EndTotals) -> EndTotals:
    """Totals that have heard of two chunks of one sample, and of its end."""
    of_batch = batch(1)
    sample = of_batch.samples["b/p#0"]
    for start, replica in ((0, "a"), (2, "b")):
        totals.chunk_came(result())
        totals.wrote(result(), sample.append(start, result(), replica))
    totals.sample_ended(SampleEnd.LENGTH)
    totals.settle()
    assert sample.tokens == 4, "tokens are written whatever is counted"
    return totals


def test_timed_totals_count_as_the_service_s_and_no_totals_count_nothing():
    plain, timed, none = (told(kind()) for kind in (EndTotals, TimedTotals, NoTotals))
    counts = ("tokens", "chunks", "samples", "moves", "faults")
    assert [getattr(timed, name) for name in counts] == [getattr(plain, name) for name in counts]
    assert plain.tokens == 4 and plain.moves == {"recomputed": 1} and plain.chunk_s["decode"].count == 2
    assert none.tokens == 0 and not none.chunks and not none.moves and not none.chunk_s["decode"].count


def test_costs_are_of_the_loop_without_them_and_of_a_core():
    off = QuietWindow(ends=1_000, loop_s=2.01, counting_s=0.0, reading_s=0.0, tracing_s=0.01, looking_s=0.0)
    on = QuietWindow(ends=2_000, loop_s=4.1, counting_s=0.01, reading_s=0.01, tracing_s=0.02, looking_s=0.06)
    found = costs([off], [on])
    assert found["of_loop"] == {"metrics": 0.005, "traces": 0.005, "board": 0.015, "all": 0.025}
    assert found["of_core"]["all"] == pytest.approx(0.1 / WINDOW_S, abs=1e-5)
    assert found["loop_us_a_chunk"] == {"off": 2_000.0, "on": 2_050.0} and found["loop_cost_by_windows"] == 0.025
    assert found["by_pair"] == [0.025]


@pytest.mark.parametrize("option", ["--replicas", "--running", "--pairs", "--rounds", "--steps"])
def test_none_of_anything_is_refused(capsys, option):
    assert run(["bench", "observability", option, "0"]) == 2
    assert option in capsys.readouterr().err
