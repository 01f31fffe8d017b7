"""A real engine under odd requests among healthy ones: `tailrace fuzz --engine` in small; longer with `--long`."""

import json

import pytest

from tailrace.lab.commands.engine_fuzz import DRAFTS
from tailrace.lab.fuzz.engine.engine_campaign import engine_campaign
from tailrace.lab.fuzz.engine.hosted import HostedEngine

SEED = 46


@pytest.mark.parametrize("seconds", [12.0, pytest.param(120.0, marks=pytest.mark.long)])
def test_a_real_engine_holds(model_dir, seconds):
    engine = HostedEngine(str(model_dir), DRAFTS)
    try:
        report = engine_campaign(engine, SEED, seconds, print, lambda line: None).values()
    finally:
        engine.close()
    print(json.dumps(report))
    assert report["findings"] == []
    assert report["engines_lost"] == report["hangs"] == report["mates_that_differ"] == 0 < report["mates"]
    assert report["fates"].keys() >= {"answered", "taken at entry", "refused at entry"}
    assert report["engine_starts"] == 1
