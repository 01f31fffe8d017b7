"""A real engine under odd requests among healthy ones: `tailrace fuzz --engine` in small; longer with `--long`."""

import json

import pytest

from tailrace.lab.commands.engine_fuzz import DRAFTS
from tailrace.lab.fuzz.engine.engine_campaign import engine_campaign
from tailrace.lab.fuzz.engine.hosted import HostedEngine

SEED = 46


@pytest.mark.parametrize(
    ("seconds", "model"), [(6.0, "shallow_model"), pytest.param(120.0, "model_dir", marks=pytest.mark.long)]
)
def test_a_real_engine_holds(request, seconds, model):
    engine = HostedEngine(str(request.getfixturevalue(model)), DRAFTS)
    try:
        report = engine_campaign(engine, SEED, seconds, print, lambda line: None).values()
    finally:
        engine.close()
    print(json.dumps(report))
    assert report["findings"] == []
    assert report["engines_lost"] == report["hangs"] == report["mates_that_differ"] == 0 < report["mates"]
    assert report["fates"].keys() >= {"answered", "taken at entry", "refused at entry"}
    assert report["engine_starts"] == 1
