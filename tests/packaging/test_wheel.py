"""The wheel: built, installed by pip into a fresh environment, and used there from a folder with an `app` of its own.

Needs a package index, or pip's cache. Prints seconds and megabytes of the light installation.
"""

import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
DATA = {
    "tailrace/py.typed", "tailrace/serve.yaml", "tailrace/serve.elastic.yaml", "tailrace/serve.gpu.yaml",
    "tailrace/lab/demo/prompts.jsonl", "tailrace/lab/demo/recorded/about.json",
    "tailrace/lab/demo/recorded/static.journal.gz", "tailrace/lab/demo/recorded/tailrace.journal.gz",
    "tailrace/lab/report/web/page.css", "tailrace/lab/report/web/spans.js",
    "tailrace/lab/simulator/scenarios/das-7b-16k.yaml", "tailrace/deployments/draft_index/scorer_weights.json",
}  # fmt: skip
HEAVY = ("ray", "vllm", "torch", "numba")

pytestmark = pytest.mark.package


def done(*command: str | Path, cwd: Path | None = None) -> str:
    """Output of a program that ends with exit code 0."""
    run = subprocess.run(list(map(str, command)), cwd=cwd, check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def python(version: str) -> Path | None:
    """An interpreter of that version on this machine, or None."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    found = installed[-1] if installed else shutil.which(f"python{version}")
    return Path(found) if found else None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the files that git tracks, so that the checkout gets no build folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in done("git", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)  # links to folders stay links
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source)
    done(*build)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_product_and_its_data_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert set(names) >= DATA
    tops = {name.split("/")[0] for name in names}
    assert tops == {"tailrace", next(top for top in tops if top.endswith(".dist-info"))}
    folders = {name.split("/")[1] for name in names if name.startswith("tailrace/") and name.count("/") > 1}
    assert folders == {"app", "deployments", "kvpool", "policies", "lab"}
    tracked = done("git", "ls-files", *sorted(folders), cwd=ROOT).splitlines()
    assert {f"tailrace/{name}" for name in tracked if name.endswith(".py")} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("version", PYTHONS)
def test_a_light_installation_works_beside_another_app(version, wheel, tmp_path, capsys):
    interpreter = python(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine")
    began = time.monotonic()
    done(interpreter, "-m", "venv", tmp_path / "venv")
    bin_folder = tmp_path / "venv" / "bin"
    install = (bin_folder / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
    run = subprocess.run(list(map(str, install)), check=False, capture_output=True, text=True, timeout=300)
    if run.returncode:
        probe = (sys.executable, "-m", "pip", "index", "versions", "click", "--retries=0", "--timeout=15")
        if subprocess.run(probe, check=False, capture_output=True).returncode:
            pytest.skip("no package index is reachable")
    assert run.returncode == 0, run.stderr
    seconds = time.monotonic() - began
    size = sum(path.stat().st_size for path in (tmp_path / "venv").rglob("*") if path.is_file()) / 1e6
    with capsys.disabled():
        print(f"\nPython {version}: {seconds:.0f} s, {size:.0f} MB; the wheel: {wheel.stat().st_size / 1e6:.2f} MB")

    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "app").mkdir(parents=True)
    (elsewhere / "app" / "__init__.py").write_text("raise RuntimeError('the folder of somebody else')\n")
    tailrace = bin_folder / "tailrace"
    assert done(tailrace, "--version", cwd=elsewhere) == "tailrace 0.2.0\n"
    assert "verl" in done(tailrace, "simulate", "--workload", "das-7b-16k", "--scale", "0.05", cwd=elsewhere)
    assert "same_samples" in done(tailrace, "demo", "--replay", "--json", cwd=elsewhere)
    assert "ordering" in done(tailrace, "policies", cwd=elsewhere)
    assert "applications" in done(tailrace, "schema", cwd=elsewhere)
    names = "connect, RolloutClient, RolloutBatch, PromptGroup, SamplingParams"
    heavy = f"import sys; assert not set({HEAVY}) & set(sys.modules)"
    done(bin_folder / "python", "-c", f"from tailrace import {names}; {heavy}", cwd=elsewhere)
    refused = subprocess.run([tailrace, "pool", "status"], cwd=elsewhere, check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr == "error: ray is not installed; run: pip install 'tailrace[cpu]'\n"
