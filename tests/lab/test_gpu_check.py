"""The driver of the steps on a GPU, without one: how steps end, which results stay, and an engine without Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_imports import loaded

from tailrace.deployments.staging.safetensors_header import read_header
from tailrace.lab.benchmarks.gpu import catalog, check, driver, made_models
from tailrace.lab.benchmarks.gpu.driver import (
    DONE,
    FAILED,
    KILLED,
    NO_TIME,
    PARTLY,
    PARTLY_CODE,
    UNLIKE,
    UNLIKE_CODE,
    CheckStep,
    Processes,
    StepEnded,
    drive,
)
from tailrace.lab.benchmarks.gpu.place import ROOT, Place, libraries_of
from tailrace.lab.benchmarks.gpu.result_lines import ResultLines, figures, table
from tailrace.lab.benchmarks.gpu.steps import __main__ as steps
from tailrace.lab.benchmarks.gpu.steps import attention, drawing, exactness

WRITES = (
    "import json,sys; open(sys.argv[1], 'a').write(json.dumps({'step': sys.argv[2], 'what': 'x', 'n': 1}) + '\\n');"
)
HANGS = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']);"
ENDS = {
    "good": WRITES,
    "bad": WRITES + "sys.exit(3)",
    "hangs": WRITES + HANGS + "open(sys.argv[3], 'w').write(str(p.pid)); time.sleep(600)",
    "partly": WRITES + f"sys.exit({PARTLY_CODE})",
    "unlike": WRITES + f"sys.exit({UNLIKE_CODE})",
    "mends": "import os, sys; sys.exit(0 if os.environ.get('MENDED') else 1)",
    "cut": WRITES + 'open(sys.argv[1], \'a\').write(\'{"step": "cut", "wh\'); sys.exit(1)',
}


def step(name: str, expected_s: float = 0, limit_s: float = 60, **more) -> CheckStep:
    return CheckStep(name, expected_s, limit_s, 1, "", "", **more)


@pytest.fixture
def run(tmp_path):
    """Runs the steps of ENDS by name."""
    results = ResultLines(tmp_path)
    with (tmp_path / "log.txt").open("ab") as log:

        def command(one: CheckStep) -> list[str]:
            return [sys.executable, "-c", ENDS[one.name], str(results.path), one.name, str(tmp_path / "child")]

        def driven(*steps: CheckStep, until_s: float = 600) -> dict[str, str]:
            processes = Processes(command, lambda _step: dict(os.environ), log)
            return drive(steps, processes, results, until_s, lambda line: None)

        driven.results = results
        yield driven


def test_a_step_that_fails_costs_itself_alone(run):
    assert run(step("bad"), step("good")) == {"bad": FAILED, "good": DONE}
    assert [line["step"] for line in run.results.since(0) if "what" in line] == ["bad", "good"], "results are kept"
    assert [line["reason"] for line in run.results.since(0) if "end" in line] == ["exit code 3", ""]


@pytest.mark.slow
def test_a_step_that_hangs_is_killed_with_all_that_it_started(run, tmp_path):
    assert run(step("hangs", limit_s=8), step("good")) == {"hangs": KILLED, "good": DONE}
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)
    assert [line["step"] for line in run.results.since(0) if "what" in line] == ["hangs", "good"]


STOPPED = """
import sys
from tailrace.lab.benchmarks.gpu import check, place

STEP = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
check.card_name = lambda: "A card"
place.Place.command = lambda self, step: [sys.executable, "-c", STEP, str(self.room / step)]
sys.exit(check.main(["--only", "probe", "--out", sys.argv[1] + "/out", "--room", sys.argv[1] + "/room"]))
"""


def test_a_command_that_is_stopped_leaves_no_step(tmp_path):
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    pids, deadline = [tmp_path / "room" / name for name in ("probe", "warm_up")], time.monotonic() + 60
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as check_process:
        while not all(pid.exists() and pid.read_text() for pid in pids):
            assert check_process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        check_process.send_signal(signal.SIGTERM)
        said = check_process.communicate(timeout=60)[1]
    assert check_process.returncode == 1 and said.startswith("gpu-check: interrupted; "), said
    assert [pid for pid in pids if Path(f"/proc/{pid.read_text()}").exists()] == []


def test_a_step_without_time_does_not_begin_and_a_shorter_one_does(run):
    assert run(step("bad", expected_s=700), step("good", expected_s=1)) == {"bad": NO_TIME, "good": DONE}
    ends = [line for line in run.results.since(0) if "end" in line]
    assert ends[0]["reason"].endswith("s left, 700 s expected") and "s" not in ends[0]


def test_a_step_is_tried_once_more_with_other_settings(run):
    second = {"MENDED": "1"}
    assert run(step("mends", second_try=second), step("bad", second_try=second)) == {"mends": DONE, "bad": FAILED}
    assert [line["end"] for line in run.results.since(0) if "end" in line] == [FAILED, DONE, FAILED, FAILED]


@pytest.mark.parametrize("how", [PARTLY, UNLIKE])
def test_a_step_with_some_of_its_figures_is_not_run_again(run, how):
    """A second try of all of it would take the minutes of the steps after it."""
    name = {PARTLY: "partly", UNLIKE: "unlike"}[how]
    assert run(step(name, second_try={"MENDED": "1"}), step("good")) == {name: how, "good": DONE}
    assert [line["end"] for line in run.results.since(0) if "end" in line] == [how, DONE]


@pytest.mark.parametrize(
    ("fails", "how", "code"), [([], DONE, 0), (["tried"], PARTLY, PARTLY_CODE), (["tried", "must"], FAILED, 1)]
)
def test_a_step_that_is_done_in_part_says_so(monkeypatch, tmp_path, fails, how, code):
    def measured(measurements):
        for name in ("tried", "must"):
            getattr(measurements, name)(name, lambda name=name: 1 / 0 if name in fails else {})

    one, place = step("one")._replace(run="one:measured"), Place(tmp_path, tmp_path, card=False, small=True)
    monkeypatch.setattr(steps, "import_module", lambda _: SimpleNamespace(measured=measured))
    assert steps.run_step(one, place).how == how
    monkeypatch.setattr(steps.catalog, "STEPS", (one,))
    monkeypatch.setattr(sys, "argv", ["steps", "one", place.text()])
    assert steps.main() == code


@pytest.mark.parametrize(
    ("figures", "level", "how", "code"),
    [
        ({"unlike": 0, "returned": True}, "bits", DONE, 0),
        ({"unlike": 2}, "bits", UNLIKE, UNLIKE_CODE),
        ({"same_tokens": False}, "bits", UNLIKE, UNLIKE_CODE),
        ({"changed": False}, "bits", UNLIKE, UNLIKE_CODE),
        ({"unlike": 2}, "law", DONE, 0),
    ],
)
def test_a_step_whose_tokens_differ_at_bits_ends_as_such(monkeypatch, tmp_path, figures, level, how, code):
    def measured(measurements, level):
        measurements.tried("again", lambda: figures)

    one = step("one", settings={"level": level})._replace(run="one:measured")
    place = Place(tmp_path, tmp_path, card=False, small=True)
    monkeypatch.setattr(steps, "import_module", lambda _: SimpleNamespace(measured=measured))
    assert steps.run_step(one, place) == StepEnded(how, "not the same: again" if code else "")
    monkeypatch.setattr(steps.catalog, "STEPS", (one,))
    monkeypatch.setattr(sys, "argv", ["steps", "one", place.text()])
    assert steps.main() == code


def test_a_second_try_needs_time_too(tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def fails(_step, _settings, _limit_s):
        now_s[0] += 0.3
        return StepEnded(FAILED, "no")

    results, one = ResultLines(tmp_path), step("a", expected_s=9.8, second_try={"MENDED": "1"})
    assert drive([one], fails, results, 10.0, lambda line: None) == {"a": FAILED}
    assert [line["end"] for line in results.since(0)] == [FAILED, NO_TIME]


def test_a_line_that_is_cut_off_hides_no_other(run):
    assert run(step("cut"), step("good")) == {"cut": FAILED, "good": DONE}
    whole = run.results.since(0)
    assert [line["step"] for line in whole if "what" in line] == ["cut", "good"]
    later = run.results.size()
    run.results.add("good", end=DONE, s=1.0)
    assert [line["end"] for line in run.results.since(later)] == [DONE]


def test_the_table_has_each_step_with_its_figures():
    lines = [
        {"at": 1, "step": "a", "what": "copy", "s": 0.1, "tb_s": 2.98765, "sizes": {"8": [1, 0.25]}},
        {"at": 1, "step": "a", "what": "more", "s": 0.1, "error": "ValueError: no"},
        {"at": 1, "step": "a", "end": FAILED, "s": 3.2, "reason": "exit code 1"},
    ]
    wanted = [
        "  copy: tb_s 2.988, sizes {8: [1, 0.25]}",
        "  more: error: ValueError: no",
        "a: failed, 3 s (exit code 1)",
    ]
    assert table(lines).splitlines() == wanted
    assert figures({"step": "a", "what": "x", "skipped": "needs a card"}) == "skipped: needs a card"


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    import numpy as np

    results = ResultLines(tmp_path)
    results.add("a", what="x", one=np.float32(0.5), many=np.arange(2), other=Path("x"))
    assert results.since(0)[0] | {"at": 0} == {
        "at": 0,
        "step": "a",
        "what": "x",
        "one": 0.5,
        "many": [0, 1],
        "other": "x",
    }


def test_a_number_that_json_does_not_have_is_written_as_text(tmp_path):
    results, nan = ResultLines(tmp_path), float("nan")
    results.add("a", what="x", one=nan, many={1: [0.5, nan, -np.inf]}, other=np.array([np.nan, 1.0]))
    strict = {"one": "NaN", "many": {"1": [0.5, "NaN", "-Infinity"]}, "other": ["NaN", 1.0]}
    (line,) = map(json.loads, results.path.read_text().splitlines())
    assert {name: line[name] for name in strict} == strict
    assert figures(line) == "one NaN, many {1: [0.5, NaN, -Infinity]}, other [NaN, 1]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--only no_such", "--only no_such: no step of this name; --list has them"),
        ("--pack PATH", "--pack PATH: no archives there; build it with `make gpu-pack`"),
        ("--pack PATH/old", "--pack PATH/old: its packages are of Python 3.12; run python3.12, or leave out --pack"),
    ],
)
def test_bad_input_is_refused_in_one_line(monkeypatch, capsys, tmp_path, words, said):
    monkeypatch.setattr(check, "PYTHON", (3, 99))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vllm.tar.xz").write_text("")
    assert check.main([word.replace("PATH", str(tmp_path)) for word in words.split()]) == 2
    assert capsys.readouterr().err == f"gpu-check: {said.replace('PATH', str(tmp_path))}\n"


def test_without_a_card_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check, "card_name", lambda: None)
    assert check.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "gpu-check: no CUDA device here; run it on a machine with one, or with --dry\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("out/results.jsonl", "my notes"), ("out/results.jsonl", "[1]\n"), ("out/log.txt", "mine"), ("room/mine", "")],
)
def test_files_of_others_stay_byte_for_byte(monkeypatch, capsys, tmp_path, name, text):
    monkeypatch.setattr(check, "card_name", lambda: "A card")
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(text)
    assert check.main(["--out", str(tmp_path / "out"), "--room", str(tmp_path / "room")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert path.read_text() == text and [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("ends", "code"), [({"a": DONE, "b": NO_TIME}, 0), ({"a": DONE, "b": KILLED}, 1), ({"a": UNLIKE}, 1)]
)
def test_the_exit_code_and_the_json_say_how_steps_ended(monkeypatch, capsys, tmp_path, ends, code):
    monkeypatch.setattr(check, "card_name", lambda: "A card")
    monkeypatch.setattr(check, "checked", lambda *_given: ends)
    monkeypatch.chdir(tmp_path)
    words = ["--out", "results", "--room", "room", "--json"]
    assert check.main(words) == code
    capsys.readouterr()
    assert check.main(words) == code, "a second run appends"
    out = json.loads(capsys.readouterr().out)
    assert (out["card"], out["ends"]) == ("A card", ends) and (tmp_path / "results" / "results.jsonl").exists()


def test_steps_are_named_once_and_each_call_fits_its_minutes():
    names = [one.name for one in catalog.STEPS]
    assert len(set(names)) == len(names) and not set(names) & set(catalog.CALLS)
    assert catalog.of([]) == list(catalog.STEPS)
    assert [one.call for one in catalog.STEPS] == sorted(one.call for one in catalog.STEPS)
    assert sum(one.expected_s for one in catalog.of(["first"])) <= 270
    assert sum(one.expected_s for one in catalog.of(["second"])) <= 400
    assert all(one.expected_s <= one.limit_s for one in catalog.STEPS)
    assert [one.name for one in catalog.of(["v1", "probe"])] == ["probe", "v1"], "in the catalog's order"


def test_every_step_is_in_the_list_and_in_the_documentation(capsys):
    assert check.main(["--list"]) == 0
    listed, text = capsys.readouterr().out, (ROOT / "docs" / "measurements" / "gpu.md").read_text()
    assert [one.name for one in catalog.STEPS if f"  {one.name} " not in listed] == []
    assert [one.name for one in catalog.STEPS if f"| `{one.name}` |" not in text] == []


def test_a_place_crosses_to_its_step_whole(tmp_path):
    place = Place(tmp_path, tmp_path / "out", card=True, small=False)
    assert Place.read(place.text()) == place
    assert place.command("v1")[1:4] == ["-m", "tailrace.lab.benchmarks.gpu.steps", "v1"]
    assert str(tmp_path / "site") not in place.environment()["PYTHONPATH"], "no pack was unpacked"
    assert libraries_of(place.site) == {}
    (tmp_path / "site" / "system").mkdir(parents=True)
    assert place.environment()["PYTHONPATH"].split(os.pathsep)[:2] == [str(tmp_path / "site"), str(ROOT)]
    assert libraries_of(place.site)["LD_LIBRARY_PATH"].startswith(str(tmp_path / "site" / "system"))


def test_a_pack_is_unpacked_once(tmp_path):
    import tarfile

    from tailrace.lab.benchmarks.gpu.unpacked import unpack

    pack, room = tmp_path / "pack", tmp_path / "room"
    pack.mkdir()
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(name)
        with tarfile.open(pack / f"{name}.tar.xz", "w:xz") as tar:
            tar.add(tmp_path / f"{name}.py", f"site/{name}.py")
    assert unpack(pack, room) > 0.0
    assert sorted(path.read_text() for path in (room / "site").iterdir()) == ["one", "two"]
    (room / "site" / "one.py").unlink()
    assert unpack(pack, room) is None and not (room / "site" / "one.py").exists()
    (tmp_path / "two.py").write_text("mended")
    (pack / "one.tar.xz").unlink()
    with tarfile.open(pack / "two.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "two.py", "site/two.py")
    assert unpack(pack, room) > 0.0, "the pack was built again"
    assert [path.read_text() for path in (room / "site").iterdir()] == ["mended"]


def test_a_library_that_is_loaded_is_found():
    from tailrace.lab.benchmarks.gpu.unpacked import loaded

    assert loaded("libc.so.6").name.startswith("libc.so") and loaded("libnowhere.so.1") is None


def test_a_model_whose_writing_was_cut_off_is_made_again(tmp_path, monkeypatch):
    def cut_off(path, *_):
        path.write_bytes(b"half")
        raise OSError("killed")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="killed"):
        patched.setattr(made_models, "_write_random", cut_off)
        made_models.model_of("tiny", tmp_path, device="cpu")
    folder = made_models.model_of("tiny", tmp_path, device="cpu")
    names = read_header(folder / made_models.WEIGHTS)[0].keys() - {"__metadata__"}
    assert names == made_models.tensors_of(made_models.SHAPES["tiny"]).keys()
    assert [path.name for path in folder.glob("*model*")] == [made_models.WEIGHTS], "vLLM reads what ends so"


# ---- samples that are compared -------------------------------------------------------------------------


class SamplesByHand(exactness.SameSamples):
    """Samples of a card, whose results are made here. `logprobs`: those of all runs but the first. `ran`: the samples
    that ran, by way.
    """

    def __init__(self, tokens=(1, 2, 3), logprobs=(-1, -2, -3)):
        step = SimpleNamespace(place=Place(ROOT, ROOT, card=True, small=False))
        super().__init__(step, None, 100)
        self._given, self.ran = (tokens, logprobs), {}
        self.together()

    def _run(self, way, samples, drafts=0):
        tokens, logprobs = ((1, 2, 3), (-1, -2, -3)) if way == "together" else self._given
        made = {"token_ids": np.array(tokens), "logprobs": np.array(logprobs, np.float32), "close_calls": ()}
        self.ran[way] = [*self.ran.get(way, ()), *samples]
        return {i: SimpleNamespace(**made) for i in samples}


def test_samples_that_run_alone_have_every_sampling():
    case = SamplesByHand()
    assert case.alone()["unlike"] == 0
    assert {i % exactness.GROUP for i in case.ran["alone"]} == set(range(exactness.GROUP))


@pytest.mark.parametrize("fails", [True, False])
def test_samples_that_failed_have_no_digest(monkeypatch, fails):
    case, said = SamplesByHand(), []
    case._step.say = lambda what, **_: said.append(what)
    case._step.tried = lambda _what, way: fails or way()
    monkeypatch.setattr(case, "_wanted", {})
    for way in ("in_chunks", "with_drafts"):
        monkeypatch.setattr(case, way, dict, raising=False)
    case.compare()
    assert said == ([] if fails else ["tokens"])


@pytest.mark.parametrize(
    ("tokens", "logprobs", "moved"),
    [
        ((1, 2, 3), (-1, -2.5, -3), 0.5),
        ((1, 9, 8), (-1.25, -9, -9), 0.25),
        ((9, 9, 9), (-9, -9, -9), 0.0),
        ((1, 2, 3), (-1, -2, np.nan), np.nan),
    ],
)
def test_logprobs_are_compared_where_tokens_are_the_same(tokens, logprobs, moved):
    found = SamplesByHand(tokens, logprobs).again()["logprobs_moved"]
    assert found == moved or (np.isnan(found) and np.isnan(moved))


def test_one_logprob_that_is_no_number_is_not_hidden_by_others():
    case = SamplesByHand()
    numbers, none = (case._run("together", range(1))[0] for _ in range(2))
    none.logprobs = np.array((-1, -2, np.nan), np.float32)
    assert np.isnan(case._unlike({0: numbers, 1: none})["logprobs_moved"])


# ---- an engine by itself needs no Ray ------------------------------------------------------------------

ENGINE = (
    "tailrace.deployments.engine.stepper",
    "tailrace.deployments.engine.engine_loop",
    "tailrace.deployments.engine.pool_client",
    "tailrace.deployments.context.context_client",
    "tailrace.deployments.drafting.drafts",
    "tailrace.deployments.staging.slots",
    "tailrace.deployments.vllm_exact.launch",
    "tailrace.deployments.vllm_exact.proposer",
    "tailrace.deployments.vllm_exact.worker",
    "tailrace.kvpool.connector",
    "tailrace.kvpool.master",
    "tailrace.kvpool.store_node",
)
"""Loaded by an engine, by its workers, and by a pool without Ray."""


def test_no_module_of_an_engine_imports_ray_as_it_is_loaded():
    """By the source, as vLLM's classes are not there: the machine that a pack is carried to has no Ray."""
    found = loaded(*ENGINE)
    assert {name: file for name, file in found.items() if name.partition(".")[0] == "ray"} == {}
    assert loaded("tailrace.deployments.context.actors")["ray"] == "deployments/context/actors.py", "it can fail"


def test_an_engine_is_imported_where_ray_is_not_installed():
    names = [name for name in ENGINE if not name.endswith(("worker", "connector", "pool_client"))]  # these import vLLM
    code = "import sys, importlib\nsys.modules['ray'] = sys.modules['vllm'] = None\n"
    code += f"for m in {[*names, 'tailrace.lab.benchmarks.pool.pool_testbed']}:\n importlib.import_module(m)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("size_bytes", "speed"),
    [(98_304, None), (5_000_000, None), (5_000_001, {"open": 0.5}), (77_791_232, {"open": 7.779})],
)
def test_a_speed_of_memory_is_given_only_for_logits_that_come_from_it(size_bytes, speed):
    seconds = 1e-5
    assert drawing.GRAPH_CALLS == 10 and drawing.speeds(size_bytes, {"open": seconds}) == speed


class EngineByHand:
    """An engine's answers by turn, in place of those of a model; an exception fails its turn."""

    def __init__(self, *turns):
        self._turns, self.answers, self.given = list(turns), self, []

    def give(self, _group, token_ids) -> None:
        self.given.append(token_ids)

    def sample(self, *_):
        found = self._turns.pop(0)
        if isinstance(found, Exception):
            raise found
        tokens, logprobs = found
        return SimpleNamespace(token_ids=np.array(tokens), logprobs=np.array(logprobs, np.float32), accepted_tokens=3)


def beside(monkeypatch, *turns) -> tuple[attention.BesidePrompts, EngineByHand]:
    engine = EngineByHand(*turns)
    monkeypatch.setattr(attention, "vocabulary_of", lambda *_: 100)
    case = attention.BesidePrompts(SimpleNamespace(place=Place(ROOT, ROOT, card=False, small=True)), engine)
    monkeypatch.setattr(case, "_sample", engine.sample)
    return case, engine


def test_a_sample_beside_prompts_is_compared_with_the_sample_alone(monkeypatch):
    case, engine = beside(monkeypatch, ([1, 2], [-1, -2]), ([1, 3], [-1.5, -9]), ([1, 2], [-1, -2]))
    assert case.moved(0) == {"unlike_tokens": 0, "first_unlike": None, "logprobs_moved": 0.0}
    assert case.moved(9) == {"unlike_tokens": 1, "first_unlike": 1, "logprobs_moved": 0.5}
    assert case.moved_by_drafts()["unlike_tokens"] == 0 and engine.given[0].tolist() == [1, 2]


def test_without_the_sample_alone_nothing_is_compared(monkeypatch):
    case, _ = beside(monkeypatch, RuntimeError("out of memory"), ([1, 3], [-1, -2]))
    with pytest.raises(RuntimeError, match="out of memory"):
        case.moved(0)
    for compared in (lambda: case.moved(9), case.moved_by_drafts):
        with pytest.raises(RuntimeError, match="the sample alone has failed"):
            compared()
