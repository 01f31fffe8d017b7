"""Every kind of bad input is one line on stderr and exit code 2, before anything is started."""

import json
import socket
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml

from tailrace.app.cli import COMMANDS, run
from tailrace.app.errors import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
GOOD = '{"prompt_id": "a", "text": "hello"}\n'


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(GOOD)
    return path


def refused(capsys, *arguments) -> str:
    """The one line a command is refused with."""
    code = run([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command, capsys):
    assert run([command, "--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"text": "cut off', "line 2: not JSON"),
        ("[1, 2]", "line 2: a JSON object is needed"),
        ('{"text": "x", "sampels": 3}', "line 2: sampels: unknown key"),
        ('{"text": "x", "sampling": {"temprature": 1}}', "line 2: sampling.temprature: unknown key"),
        ('{"text": ""}', "line 2: text is empty"),
        ('{"token_ids": []}', "line 2: token_ids is empty"),
        ('{"messages": []}', "line 2: messages is empty"),
        ('{"messages": [{"content": "x"}]}', "line 2: messages.0.role: Field required"),
        ('{"prompt_id": "b"}', "line 2: no prompt: give text, messages or token_ids"),
        ('{"instruction": "b"}', "line 2: no prompt: give text, messages or token_ids"),
        ('{"prompt": 5}', "line 2: prompt: give text, messages or token ids, not int"),
        ('{"prompt": "a", "text": "b"}', "line 2: give exactly one of"),
        ('{"prompt": "a", "max_token": 5}', "line 2: max_token: unknown key; did you mean max_tokens?"),
        ('{"text": "\\ud83d"}', "line 2: text: a \\u escape is half of a surrogate pair"),
        ('{"prompt_id": "\\ud83d", "text": "a"}', "line 2: prompt_id: a \\u escape is half"),
        ('{"text": "x", "sampling": {"temperature": 1e400}}', "line 2: 1e400 is beyond the numbers"),
        ('{"text": "x", "samples": %s}' % ("9" * 5000), "line 2: 99999999999999999999...: a number of 5000 digits"),
        ("[" * 100000, "line 2: not usable: it is nested too deeply"),
        ('{"text": "x\\u0000"', "line 2: not JSON"),
        ('{"text": "x", "samples": 0}', "line 2: samples"),
        ('{"text": "x", "max_tokens": -1}', "line 2: max_tokens"),
        ('{"prompt_id": "a", "text": "x"}', "line 2: prompt_id 'a' is on line 1 already"),
    ],
)
def test_a_bad_prompt_names_file_line_and_key(prompts, tmp_path, capsys, line, said):
    prompts.write_text(GOOD + line + "\n")
    assert f"{prompts} {said}" in refused(capsys, "rollout", "--prompts", prompts, "--out", tmp_path / "out.jsonl")


def test_no_prompts_at_all(prompts, tmp_path, capsys):
    prompts.write_text("\n")
    assert "holds no prompt" in refused(capsys, "rollout", "--prompts", prompts, "--out", tmp_path / "out.jsonl")


@pytest.mark.parametrize("option, value", [("--samples", 0), ("--samples", -3), ("--max-tokens", 0), ("--top-p", 0)])
def test_options_out_of_range(prompts, tmp_path, capsys, option, value):
    assert option in refused(capsys, "rollout", "--prompts", prompts, "--out", tmp_path / "o", option, value)


def test_an_unwritable_output(prompts, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out.jsonl"
    assert "give another --out" in refused(capsys, "rollout", "--prompts", prompts, "--out", out)
    assert "give another --out" in refused(capsys, "rollout", "--prompts", prompts, "--out", tmp_path)


def test_an_output_that_holds_something_else(prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text('{"something": "else"}\n')
    assert "not a rollout of ours" in refused(capsys, "rollout", "--prompts", prompts, "--out", out)
    assert out.read_text() == '{"something": "else"}\n'


def with_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return path


def test_an_unknown_policy_gives_the_nearest(prompts, tmp_path, capsys):
    config = with_config(
        tmp_path,
        "applications:\n- deployments:\n  - name: Coordinator\n    user_config: {policies: {placement: least_kw}}\n",
    )
    said = refused(capsys, "rollout", "--prompts", prompts, "--out", tmp_path / "o", "--config", config)
    assert "unknown placement 'least_kw'; nearest: least_kv" in said


def test_a_missing_model_folder(prompts, tmp_path, capsys):
    config = with_config(tmp_path, "applications: [{args: {engine: {model: /no/such/folder}}}]\n")
    said = refused(capsys, "rollout", "--prompts", prompts, "--out", tmp_path / "o", "--config", config)
    assert "/no/such/folder" in said


def test_a_port_in_use(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port {port} is in use" in refused(capsys, "serve", "--port", port)


def test_a_bad_trace(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_id": 1, "prompt": "x"}\n')
    assert f"{trace} line 1: not a trace line" in refused(capsys, "bench", "live", "--trace", trace)


def test_an_unknown_command(capsys):
    assert "nonsense" in refused(capsys, "nonsense")


@pytest.mark.parametrize("arguments", [(), ("pool",), ("history",), ("drafts",), ("bench",)])
def test_a_group_without_a_command_prints_help(arguments, capsys):
    assert run(list(arguments)) == 0
    assert "Commands:" in capsys.readouterr().out


def test_the_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tailrace ")


@pytest.mark.parametrize(
    "arguments, nearest",
    [(("simulat",), "simulate"), (("pool", "statsu"), "status"), (("bench", "scheduer"), "scheduler")],
)
def test_a_mistyped_command_gives_the_nearest(arguments, nearest, capsys):
    said = refused(capsys, *arguments)
    assert f"did you mean '{nearest}'?" in said.lower() and arguments[-1] in said


def test_a_command_without_its_extra_names_it(capsys, monkeypatch):
    monkeypatch.setitem(COMMANDS, "heavy", "A command that imports Ray.")
    module = ModuleType("tailrace.app.commands.heavy")
    module.command = click.Command("heavy", callback=lambda: (_ for _ in ()).throw(missing("ray.serve")))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert refused(capsys, "heavy") == "error: ray is not installed; run: pip install 'tailrace[cpu]'\n"
    module.command = click.Command("heavy", callback=lambda: (_ for _ in ()).throw(missing("our_typo")))
    with pytest.raises(ModuleNotFoundError, match="our_typo"):
        run(["heavy"])


def missing(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_every_import_of_an_extra_is_in_that_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    imported_as = {"mooncake": "mooncake-transfer-engine", "zmq": "pyzmq", "PIL": "pillow"}
    for package, extra in EXTRAS.items():
        name = imported_as.get(package, package.replace("_", "-"))
        assert any(line.startswith(name) for line in extras[extra]), package


def test_the_schema_describes_the_file_we_ship(capsys):
    assert run(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    for name in ("serve.yaml", "serve.elastic.yaml", "serve.gpu.yaml"):
        jsonschema.validate(yaml.safe_load((ROOT / name).read_text()), schema)


def test_policies_lists_every_family_as_json(capsys):
    assert run(["policies", "--json"]) == 0
    families = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"fcfs", "group_static", "seer", "oracle_longest_first"} <= set(families["ordering"])
    assert {"least_kv", "round_robin", "pinned"} <= set(families["placement"])
    assert families["chunking"]["fixed"]["knobs"]["chunk_tokens"]["default"] == 8192
    for members in families.values():
        for member in members.values():
            assert member["about"] and all(knob["about"] for knob in member["knobs"].values())


def test_policies_for_people(capsys):
    assert run(["policies"]) == 0
    assert "chunk_tokens = 8192" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--train", "--samples", "3"), "--samples: is not an option of --train"),
        (("--train", "--runs", "moved"), "--runs: is not an option of --train"),
        (("--steps", "5"), "--steps: is an option of --train alone"),
    ],
)
def test_the_certificates_refuse_each_others_options(capsys, arguments, said):
    assert said in refused(capsys, "verify", *arguments)
