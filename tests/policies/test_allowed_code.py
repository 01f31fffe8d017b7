"""Code by dotted path: only of allowed packages, and a refused module has not run."""

import subprocess
import sys

import pytest
import yaml
from click import Command
from click.testing import CliRunner
from pydantic import ValidationError

from tailrace.app.allow_code import allow_code_option
from tailrace.app.cli import run
from tailrace.app.cluster import declared
from tailrace.app.config import ServeFile, load_config
from tailrace.policies.families import allowed_code
from tailrace.policies.families.allowed_code import added_code, allow_code
from tailrace.policies.families.registry import Policies

MODULE = '''
from pathlib import Path
from tailrace.policies.families.ordering import Fcfs
Path(__file__).with_name("it_ran").touch()
class Mine(Fcfs):
    """Another name."""
'''
NAMED = {"ordering": {"type": "stranger.inside:Mine"}}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A package that nothing has allowed; `it_ran` appears in it when its module is imported."""
    package = tmp_path / "stranger"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inside.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(allowed_code, "_added", set())
    yield package / "it_ran"
    for name in ("stranger.inside", "stranger"):
        sys.modules.pop(name, None)


def file_with(tmp_path, **user_config):
    path = tmp_path / "serve.yaml"
    coordinator = {"name": "Coordinator", "user_config": user_config}
    path.write_text(yaml.safe_dump({"applications": [{"name": "tailrace", "deployments": [coordinator]}]}))
    return path


def test_a_stranger_is_refused_in_one_line_and_not_imported(stranger):
    with pytest.raises(ValidationError) as caught:
        Policies(**NAMED)
    (error,) = caught.value.errors()
    assert "code of package 'stranger' is not allowed and was not imported" in error["msg"] and "\n" not in error["msg"]
    assert "--allow-code stranger" in error["msg"]
    assert not stranger.exists() and "stranger" not in sys.modules


def test_an_allowed_package_is_imported(stranger):
    allow_code("stranger")
    assert type(Policies(**NAMED).ordering).__name__ == "Mine" and stranger.exists()


@pytest.mark.parametrize("path", ["os:system", "strange:Mine", "stranger_too.inside:Mine", ".stranger:Mine", ":Mine"])
def test_neighbours_of_an_allowed_package_are_not(stranger, path):
    allow_code("stranger")
    with pytest.raises(ValidationError, match="is not allowed"):
        Policies(ordering={"type": path})


def test_our_own_modules_are_allowed(stranger):
    assert Policies(ordering={"type": "tailrace.policies.families.ordering:Fcfs"}).ordering.type == "fcfs"


def test_a_package_with_entry_points_is_allowed(stranger, tmp_path):
    folder = tmp_path / "strangers-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[tailrace.policies]\nordering.mine = stranger.inside:Mine\n")
    assert type(Policies(ordering="mine").ordering).__name__ == "Mine"
    assert type(Policies(**NAMED).ordering).__name__ == "Mine"


def test_a_file_is_refused_unless_it_allows_its_own_code(stranger, tmp_path, capsys):
    path = file_with(tmp_path, policies=NAMED)
    assert run(["simulate", "--compare", "config", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "user_config.policies.ordering: ordering 'stranger.inside:Mine'" in error
    assert not stranger.exists()
    found = load_config(file_with(tmp_path, allowed_code=["stranger"], policies=NAMED))
    config = found.application.user_config
    assert stranger.exists() and config.allowed_code == ("stranger",)
    assert declared(found)["applications"][0]["deployments"][0]["user_config"]["allowed_code"] == ["stranger"]


@pytest.mark.parametrize("name", ["stranger.inside", "", "a b", "a:b", 3])
def test_only_names_of_top_level_packages_are_taken(stranger, tmp_path, name):
    with pytest.raises(Exception, match="allowed_code"):
        load_config(file_with(tmp_path, allowed_code=[name]))
    assert not added_code()


def test_packages_of_the_command_line_go_with_the_file_to_the_service(stranger, tmp_path):
    def command() -> None:
        for written in ({"policies": NAMED}, {}):
            file = load_config(file_with(tmp_path, **written))
            assert file.application.user_config.allowed_code == ("also", "stranger")
        (tmp_path / "empty.yaml").touch()
        file = load_config(tmp_path / "empty.yaml")
        assert file == ServeFile()
        (sent,) = declared(file)["applications"][0]["deployments"]
        assert sent == {"name": "Coordinator", "user_config": {"allowed_code": ["also", "stranger"]}}

    made = allow_code_option(Command("command", callback=command))
    done = CliRunner().invoke(made, ["--allow-code", "stranger", "--allow-code", "also"], catch_exceptions=False)
    assert done.exit_code == 0 and stranger.exists()


def test_a_wrong_package_name_on_the_command_line_is_one_line(stranger, capsys):
    assert run(["simulate", "--allow-code", "a.b"]) == 2
    assert capsys.readouterr().err.startswith("error: --allow-code: 'a.b' is not the name of a top-level package")


def test_a_process_begins_with_nothing_added():
    code = "from tailrace.policies.families.allowed_code import added_code; print(added_code())"
    assert subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout == "()\n"
