"""No file of a user's is lost: every writer goes through one check, and what is not ours stays byte for byte."""

import ast
import gzip
import os
from pathlib import Path

import pytest
from test_imports import EVERY, nodes_of, tree_of

from tailrace.app.cli import run
from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.lines_file import LinesFile
from tailrace.app.files.output_file import OutputFile, OutputKind, check_apart, output_folder
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.record.sent_weights import SentWeights
from tailrace.app.train.train_config import TrainConfig
from tailrace.app.trl.weights_folders import WeightsFolders

CHECKED = {
    "app/files/output_file.py": "the check itself",
    "app/files/lines_file.py": "the same for files of lines",
    "app/files/figures.py": "draws into memory, and writes through the check",
}
"""Writers of files that a user names."""

OURS = {
    "app/train/record/run_folder.py": "the folder of a run, which is ours by its configuration",
    "app/train/record/row_file.py": "in the folder of a run",
    "app/train/record/stored_groups.py": "in the folder of a run",
    "app/trl/weights_folders.py": "folders that hold nothing but shards",
    "app/model.py": "a new folder, by one rename",
    "app/distill/drafter.py": "a new folder, by one rename",
    "app/commands/serve.py": "a temporary file",
    "app/calls/result_texts.py": "a temporary folder",
    "app/gateway/images/processing.py": "its pipe",
    "lab/fuzz/engine/host.py": "the log of its own process, in a temporary folder",
    "lab/fuzz/log_disk.py": "the disk of a simulation, in a temporary folder",
    "lab/soak/driver_process.py": "a temporary folder",
    "lab/verification/adapters.py": "a temporary folder",
    "lab/verification/disturbances.py": "a temporary folder",
    "lab/verification/restarted_head.py": "a temporary folder",
    "lab/benchmarks/commands/ladder.py": "a temporary folder",
    "lab/benchmarks/commands/train.py": "a temporary folder",
    "lab/benchmarks/live/tail.py": "a temporary file",
    "lab/benchmarks/live/heads.py": "a temporary folder",
    "lab/benchmarks/live/ranks.py": "a temporary folder",
    "lab/benchmarks/engine/overhead.py": "a temporary folder",
    "lab/benchmarks/gpu/check.py": "the log of its own results, appended to",
    "lab/benchmarks/gpu/made_models.py": "in the room of the check, which is marked as ours",
    "lab/benchmarks/gpu/place.py": "the mark of a room, in a new or empty folder",
    "lab/benchmarks/gpu/result_lines.py": "lines of its own kind, appended to",
    "lab/benchmarks/gpu/unpacked.py": "in the room of the check",
    "lab/benchmarks/http/servers.py": "a temporary folder",
    "lab/benchmarks/pool/heavy_model.py": "a new folder in the user's cache, by one rename",
    "deployments/batches/token_log.py": "a folder of the service, files of its own names, no links",
    "deployments/constraints/form_check.py": "its pipe and the null device",
    "deployments/context/history.py": "databases with an application id of ours",
    "deployments/staging/piece_files.py": "shared memory",
    "deployments/staging/pool_copy.py": "shared memory",
    "deployments/staging/slots.py": "shared memory",
    "deployments/staging/stage.py": "shared memory",
    "deployments/vllm_exact/launch.py": "a temporary file",
}
"""Other writers, with the reason why nothing of a user's is there."""

WRITES = {
    "write_text",
    "write_bytes",
    "touch",
    "dump_stats",
    "savefig",
    "save_file",
    "save_pretrained",
    "copy",
    "copyfile",
}
OPENS = {"open", "NamedTemporaryFile", "File", "connect", "GzipFile", "ZipFile", "fdopen"}


def mode_of(call: ast.Call) -> str:
    """The mode of a call that opens: of `open(path, mode)` and of `path.open(mode)`."""
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    texts += [k.value.value for k in call.keywords if k.arg == "mode" and isinstance(k.value, ast.Constant)]
    return next((text for text in texts if 0 < len(text) <= 3 and set(text) <= set("rwaxbt+")), "r")


def is_writing(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name == "touch" and call.args:
        return False  # no path's
    if name in WRITES:
        return name != "copy" or owner == "shutil"
    if owner == "os" and name == "open":
        return "O_RDONLY" not in ast.unparse(call)
    if owner == "json" and name == "dump":
        return True
    if name == "connect":
        return owner == "sqlite3" and ast.unparse(call.args[0]) != "':memory:'"
    return name in OPENS and bool(set(mode_of(call)) & set("wax+"))


def writers(names) -> set[str]:
    found = set()
    for name in names:
        for node in nodes_of(tree_of(name)):
            if isinstance(node, ast.Call) and is_writing(node):
                found.add(name)
    return found


def test_every_writer_is_a_known_one():
    found = writers(EVERY)
    assert found - CHECKED.keys() - OURS.keys() == set(), "go through OutputFile or LinesFile, or say why not"
    assert (CHECKED.keys() | OURS.keys()) - found == set(), "it writes no more: take it out"


@pytest.mark.parametrize(
    "text", ["open(p, 'w')", "p.open('ab')", "p.write_text('')", "gzip.open(p, 'wt')", "open(p, mode='r+b')",
             "json.dump(a, b)", "figure.savefig(p)", "click.File('w')", "os.open(p, os.O_CREAT | os.O_RDWR)"],
)  # fmt: skip
def test_a_writer_is_seen(text):
    assert is_writing(ast.parse(text, mode="eval").body)


NOTES = OutputKind("a test's file", (b"ours ",), (b"sign",))


def test_a_file_of_ours_is_written_again_and_another_one_stays(tmp_path):
    path = tmp_path / "x"
    for text in ("ours sign 1", "ours sign 2"):
        OutputFile(path, "--out", NOTES).write(text)
        assert path.read_text() == text
    for other in ("my notes", "ours without it", "\n", "\x1f\x8b"):
        path.write_text(other, encoding="latin-1")
        with pytest.raises(BadInput, match=r"--out .*x: is there and is not a test's file, and is left as it is"):
            OutputFile(path, "--out", NOTES)
        assert path.read_text(encoding="latin-1") == other
    path.write_bytes(gzip.compress(b"ours sign"))
    OutputFile(path, "--out", NOTES)


def test_a_file_that_comes_meanwhile_stays(tmp_path):
    file = OutputFile(tmp_path / "x", "--out", NOTES)
    assert not file.path.exists(), "the check leaves nothing"
    file.path.write_text("my notes")
    with pytest.raises(Failed, match="left as it is"):
        file.write("ours sign")
    assert file.path.read_text() == "my notes"


def test_what_is_no_file_to_write_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for path, said in (
        (tmp_path, "is a folder, and a file is needed"),
        (tmp_path / "none" / "x", "its folder does not exist"),
        (tmp_path / "file" / "x", "cannot be written: Not a directory"),
        (tmp_path / "loop", "cannot be written: Too many levels"),
        (Path("/proc/x"), "its folder cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long"),
    ):
        with pytest.raises(BadInput, match=said):
            OutputFile(path, "--out", NOTES)
    OutputFile(Path("/dev/null"), "--out", NOTES).write("ours")
    for path, said in ((tmp_path / "file", "is a file, and a folder"), (Path("/proc/x"), "cannot be made")):
        with pytest.raises(BadInput, match=said):
            output_folder(path, "--out")


def test_a_file_that_is_read_is_not_written_by_any_spelling(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("x")
    (tmp_path / "link").symlink_to(prompts)
    os.link(prompts, tmp_path / "hard")
    for name in ("p.jsonl", "link", "hard", "../" + tmp_path.name + "/p.jsonl"):
        with pytest.raises(BadInput, match="is the file of --prompts too; give another --out"):
            check_apart({"--out": tmp_path / name}, {"--prompts": prompts})
    with pytest.raises(BadInput, match=r"--trace .*new: is the file of --out too"):
        check_apart({"--out": tmp_path / "new", "--trace": tmp_path / "." / "new"}, {"--prompts": prompts})
    check_apart({"--out": Path("/dev/null"), "--trace": Path("/dev/null"), "--journal": None}, {"--prompts": prompts})


LINES = ('{"name": "a", "made": 1}\n', '{"name": "b", "made": 2}\n')


def lines_of(path: Path) -> list[dict]:
    found: list[dict] = []
    file = LinesFile(path, "a line of a test", ("name", "made"))
    try:
        file.read(lambda line: found.append({"name": line["name"], "made": line["made"]}))
    finally:
        file.close()
    return found


def test_lines_of_ours_are_read_at_every_cut(tmp_path):
    path, whole = tmp_path / "x", "".join(LINES)
    for cut in range(len(LINES[0]), len(whole) + 1):
        path.write_text(whole[:cut])
        found = len(lines_of(path))
        assert path.read_text() == "".join(LINES[:found]), cut
        assert found == 1 + (cut >= len(whole) - 1), "a line that lacks its end alone is whole"


@pytest.mark.parametrize(
    "text",
    ["my notes", "my notes\n", '{"name": "a", "text": "b"}', '{"name": "a", "text": "b"}\n', '{"name": "a', "{", "\n",
     "[1]\n", LINES[0] + "my notes", LINES[0] + '{"name": "a", "text": "b"}', LINES[0] + '{"name": "b", "text',
     LINES[0] + "\n" + LINES[1], LINES[0] + '{"name": "a"}\n', '{"name": "a", "made": 1,', "\ufeff" + LINES[0], "\x00"],
)  # fmt: skip
def test_lines_of_others_stay_byte_for_byte(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    if text == '{"name": "a", "made": 1,':
        assert lines_of(path) == [] and path.read_text() == "", "ours, cut off"
        return
    with pytest.raises(BadInput, match=r"x line \d: not a line of a test; the file is left as it is"):
        lines_of(path)
    assert path.read_text() == text


def test_the_folder_of_a_run_takes_nothing_of_others(tmp_path):
    config = TrainConfig(task={"name": "chain_sum"})
    for name, text, said in (
        ("ledger.jsonl", "mine", "ledger.jsonl is there and is of no run of ours"),
        ("curve.png", "mine", "curve.png is there"),
        ("config.json", '{"model_type": "llama"}', "not the configuration of a run: no "),
        ("config.json", "mine", "not the configuration of a run: not JSON"),
        ("config.json", "[" * 100_000, "nested too deeply"),
    ):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(BadInput, match=said):
            RunFolder(folder, config)
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, text)]
    again = tmp_path / "run"
    assert RunFolder(again, config).path == RunFolder(again, config, plot=True).path
    (again / "weights.jsonl").write_text("mine\nmine\n")
    with pytest.raises(BadInput, match=r"weights.jsonl line 1: not a row of a run"):
        RowFile(again / "weights.jsonl", SentWeights)


def test_folders_of_weights_replace_none_but_their_own(tmp_path):
    (tmp_path / "weights-1").mkdir()
    (tmp_path / "weights-1" / "model-00000.safetensors").write_text("")
    WeightsFolders(tmp_path)
    (tmp_path / "weights-1" / "mine.txt").write_text("")
    with pytest.raises(BadInput, match="weights-1 is there and is not of ours"):
        WeightsFolders(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        "rollout --prompts PROMPTS --out FILE", "rollout --prompts FILE --out FILE",
        "rollout --prompts PROMPTS --out NEW --trace FILE", "rollout --prompts PROMPTS --out NEW --journal FILE",
        "simulate --out FILE", "simulate --report FILE", "profile --out FILE", "schema --out FILE",
        "demo --out FILE", "demo --replay --out FILE", "soak --out FILE",
        "timeline JOURNAL --out FILE.html",
        "timeline JOURNAL --out FILE.perfetto.json",
        "model --out FILE", "distill-drafter --rollouts PROMPTS --out FILE", "train TASK --out FILE",
        "history import PROMPTS --history-dir FILE", "history list --history-dir FILE",
        "bench ladder --out FILE", "bench ladder --plot FILE.png", "bench fleet --profile FILE",
        "bench drafts --trace PROMPTS --fit FILE", "bench live --drafts --trace PROMPTS --plot FILE.png",
        "bench pipeline --plot FILE.svg",
    ],
)  # fmt: skip
def test_every_command_leaves_what_is_not_ours(tmp_path, capsys, arguments):
    places = {"PROMPTS": tmp_path / "p.jsonl", "NEW": tmp_path / "new.jsonl", "TASK": tmp_path / "t.yaml"}
    places["PROMPTS"].write_text('{"text": "hello"}\n')
    places["TASK"].write_text("task: {name: chain_sum, train: 2, held_out: 0}\n")
    places["JOURNAL"] = Path(__file__).parents[1] / "data" / "journal.jsonl.gz"
    words = [str(places.get(word, word)) for word in arguments.split()]
    words = [word.replace("FILE", str(tmp_path / "notes")) if word.startswith("FILE") else word for word in words]
    guarded = [Path(word) for word in words if "/notes" in word]
    for path in guarded:
        path.write_text("my notes")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert {path.read_text() for path in guarded} == {"my notes"}
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing is started, nothing is left"
