"""The parts of `bench metrics` that need no Ray: totals with and without counting."""

import pytest
from test_metrics import batch, result

from tailrace.app.cli import run
from tailrace.deployments.metrics.totals import EndTotals
from tailrace.policies.protocol.actions import SampleEnd


def told(totals: EndTotals) -> EndTotals:
    """Totals that have heard of two chunks of one sample, and of its end."""
    of_batch = batch(1)
    sample = of_batch.samples["b/p#0"]
    for start, replica in ((0, "a"), (2, "b")):
        totals.chunk_came(result())
        totals.write(of_batch, sample, start, result(), replica)
    totals.sample_ended(SampleEnd.LENGTH)
    totals.settle()
    assert sample.tokens == 4, "tokens are written whatever is counted"
    return totals


def test_timed_totals_count_as_the_service_s_and_no_totals_count_nothing():
    from benchmarks.metrics.totals import NoTotals, TimedTotals

    plain, timed, none = (told(kind(lambda: 1.0)) for kind in (EndTotals, TimedTotals, NoTotals))
    counts = ("tokens", "chunks", "samples", "moves", "faults")
    assert [getattr(timed, name) for name in counts] == [getattr(plain, name) for name in counts]
    assert plain.tokens == 4 and plain.moves == {"recomputed": 1} and plain.chunk_s["decode"].count == 2
    assert none.tokens == 0 and not none.chunks and not none.moves and not none.chunk_s["decode"].count


@pytest.mark.parametrize("option", ["--replicas", "--pairs", "--steps", "--chunks"])
def test_none_of_anything_is_refused(capsys, option):
    assert run(["bench", "metrics", option, "0"]) == 2
    assert option in capsys.readouterr().err
