"""The steps of `gpu check` on CPUs, so that they cannot rot before a GPU is there to run them."""

import json
import subprocess
import sys
from collections import defaultdict

import pytest

from tailrace.lab.benchmarks.gpu import catalog
from tailrace.lab.benchmarks.gpu.place import ROOT

SAME_TOKENS = ("again", "alone", "in chunks", "with drafts", "flips")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the dry run of all steps gives, with `of`: measurements by step and name."""
    folder = tmp_path_factory.mktemp("gpu-check")
    words = ["--dry", "--json", "--out", str(folder / "out"), "--room", str(folder / "room"), "--until", "3000"]
    command = [sys.executable, "-m", "tailrace.lab.benchmarks.gpu.check", *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    log = folder / "out" / "log.txt"
    assert run.returncode == 0, f"{run.stdout[-3_000:]}\n{run.stderr[-3_000:]}\n{log.read_text()[-5_000:]}"
    found = json.loads(run.stdout)
    found["of"] = defaultdict(dict)
    for line in found["results"]:
        if "what" in line:
            found["of"][line["step"]][line["what"]] = line
    return found


def test_every_step_ends_well_and_says_what_needs_a_card(ran):
    assert ran["ends"] == {step.name: "done" for step in catalog.STEPS} and ran["card"] is None
    reasons = {line["step"]: line["reason"] for line in ran["results"] if "end" in line}
    assert {name for name, reason in reasons.items() if reason} == {step.name for step in catalog.STEPS if not step.dry}
    assert {reason for reason in reasons.values() if reason} == {"needs a card"}
    assert not [line for line in ran["results"] if "error" in line]


def test_tokens_are_the_same_however_they_are_computed(ran):
    for step in ("exact_eager", "v1", "experts", "fp8", "drafter"):
        found = {name: ran["of"][step][name] for name in SAME_TOKENS if name in ran["of"][step]}
        assert [each["unlike"] for each in found.values()] == [0] * len(found) and len(found) >= 4
        assert found["with drafts"]["accepted_tokens"] > 0, "drafts that hit are drafts"
    own = ran["of"]["drafter"]["with drafts"]
    assert own["accepted_tokens"] >= 0.8 * own["drafted_tokens"], "the model is its own draft model"
    assert ran["of"]["exact_eager"]["tokens"]["digest"] == ran["of"]["v1"]["tokens"]["digest"]


def test_operators_and_the_fused_draw_are_right(ran):
    operators = ran["of"]["operators"]
    for name in ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding"):
        assert 0 < operators[name]["distance"] < 0.01, name
    draws = ran["of"]["sampler"]["tokens of the CPU"]
    assert (draws["tokens_differ"], draws["close_calls_differ"]) == (0, 0) and draws["rows"] > 0


def test_rows_of_attention_have_equal_bits(ran):
    found = ran["of"]["attention_triton"]
    assert found["backend"]["name"] == "CPU_ATTN"
    rows = [line for name, line in found.items() if name.startswith("rows, context")]
    for line in rows:
        moved = [line["again"], line["beside_decoding"], *line["beside_prefill"].values(), *line["verifying"].values()]
        assert moved == [0.0] * len(moved) and len(moved) > 6
    samples = [line for name, line in found.items() if name.startswith("sample ")]
    assert [line["unlike_tokens"] for line in samples] == [0] * 4 and len(rows) == 2
    assert found["sample with drafts"]["accepted_tokens"] > 0


def test_steps_are_timed_part_by_part(ran):
    ours = {kind: ran["of"]["v1"][f"2 samples, drafts {kind}"] for kind in ("off", "miss", "hit")}
    for line in (*ours.values(), ran["of"]["stock"]["2 samples"]):
        parts = line["pass_ms"], line["drawing_ms"], line["between_ms"]
        assert min(parts) > 0 and line["tokens_a_second"] > 0
    of_a_step = {kind: line["tokens_of_a_sample_and_step"] for kind, line in ours.items()}
    assert of_a_step["off"] == 1.0 and of_a_step["miss"] < 2.0 < of_a_step["hit"]


def test_weights_memory_and_kv_come_back(ran):
    loads = ran["of"]["weights"]["from a folder"], ran["of"]["experts"]["new weights"], ran["of"]["fp8"]["new weights"]
    for folder in loads:
        assert folder["changed"] and folder["returned"] and (folder["held_unlike"], folder["not_read"]) == (0, "")
    assert ran["of"]["kv_copy"]["16 blocks, gathered"]["same"]
    assert ran["of"]["sleep"]["a turn"]["same_tokens"]
    moved = ran["of"]["pool"]["60 tokens"]
    assert moved["same_tokens"] and moved["pulled_tokens"] > 0
