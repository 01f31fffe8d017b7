"""`bench tracing` counts what spans cost, and nothing of calls that make none."""

import json
import subprocess
import sys

import pytest

from benchmarks.engine.tracing_cost import collector, share
from tailrace.app.cli import run

PROGRAM = """
import json
from benchmarks.engine.tracing_cost import TracingCost
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


def test_calls_without_a_span_cost_nothing_and_exports_are_counted():
    with collector():
        said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    (off_spans, off_s), (on_spans, on_s), exported_s = json.loads(said.stdout)
    assert (off_spans, on_spans) == (0, 51) and off_s == 0 < on_s and exported_s > 0


def test_a_share_is_of_the_time_without_tracing():
    assert share(1.0, 5.0) == 0.25 and share(0.0, 5.0) == 0.0


@pytest.mark.parametrize("option", ["--running", "--seconds"])
def test_none_of_anything_is_refused(capsys, option):
    assert run(["bench", "tracing", option, "0"]) == 2
    assert option in capsys.readouterr().err
