"""`tailrace bench ladder` with profiles made before: every look-up method is really timed, vLLM's among them."""

import json

import pytest

from tailrace.app.cli import run
from tailrace.policies.families.racing import MethodProfile, MethodTable

pytestmark = pytest.mark.live


def test_the_ladder_of_this_machine(tmp_path, capsys):
    profile, out = tmp_path / "profile.json", tmp_path / "ladder.json"
    steps = [
        {"chunks": 1, "draft_tokens": tokens - 1, "context_tokens": 32, "step_ms": 30 + tokens} for tokens in (1, 8, 64)
    ]
    profile.write_text(json.dumps({"steps": steps}))
    files = ["--profile", profile, "--drafter-profile", profile, "--out", out]
    assert run(["bench", "ladder", "--json", "--acceptance", "model=0.8", *map(str, files)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = json.loads(out.read_text())["ladders"]["1"]["rungs"]
    ladder = MethodTable(
        tuple(MethodProfile(row["method"], tuple(map(tuple, row["curve"])), tuple(row["profile"])) for row in rows)
    )
    assert {rung.method for rung in ladder.rungs} == {"group", "history", "ngram", "model"}
    assert 1 < ladder.speedup("ngram", 0.8) < 1 / (1 - 0.8), "in steps of 30 ms a look-up costs nothing that counts"
    assert ladder.speedup("model", 0.8) < 1, "a draft model as slow as its target never pays"
    assert all(0 < took_us < 1e5 for of in list(result["draft_us"].values())[:3] for took_us in of.values())
