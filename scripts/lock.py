"""Writes requirements/NAME.txt from NAME.in: every package that is needed, pinned with ==, with its hash.

pip resolves (a dry run over metadata: no wheel is downloaded whole); this file walks pip's report from the
direct requirements and writes what it reaches, except what LEFT_OUT names (and what only that needs).
Run by `make lock`, on Linux x86_64 with Python 3.11, since wheels and markers are those of this interpreter,
and where pip finds a CPU build of torch, so that cpu.txt gets no CUDA packages.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
# They come as builds for CUDA, which break `import transformers` beside a CPU torch ("operator torchvision::nms
# does not exist"); vLLM runs text models without them.
LEFT_OUT = {"cpu": {"torchvision", "torchaudio", "torchcodec"}, "gpu": set()}
RESOLVE = ("install", "--dry-run", "--ignore-installed", "--quiet", "--no-cache-dir", "--use-feature=fast-deps")


def resolve(source: Path) -> list[dict]:
    """What pip would install for the requirements in `source`: the `install` list of its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", *RESOLVE, "--report", str(report), "--requirement", str(source)]
        subprocess.run(command, check=True)
        return json.loads(report.read_text())["install"]


def direct(source: Path) -> list[Requirement]:
    """The requirements written in `source`, without comments."""
    lines = (line.split("#")[0].strip() for line in source.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def reached(wanted: list[Requirement], found: dict[str, dict], left_out: set[str]) -> set[str]:
    """Names of the packages that `wanted` needs, directly or not, never passing through `left_out`."""
    seen, todo = set(), [(canonicalize_name(need.name), extra) for need in wanted for extra in ("", *need.extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for need in map(Requirement, found[name]["metadata"].get("requires_dist", [])):
            child = canonicalize_name(need.name)
            if child not in left_out and (need.marker is None or need.marker.evaluate({"extra": extra})):
                todo += [(child, inner) for inner in ("", *need.extras)]
    return {name for name, _ in seen}


def lock(name: str) -> int:
    """Write requirements/NAME.txt; the number of packages in it."""
    source = FOLDER / f"{name}.in"
    found = {canonicalize_name(item["metadata"]["name"]): item for item in resolve(source)}
    lines = [f"# Made from {source.name} by `make lock`: Linux x86_64, Python 3.11. Install with --no-deps."]
    for package in sorted(reached(direct(source), found, LEFT_OUT[name])):
        sha256 = found[package]["download_info"]["archive_info"]["hashes"]["sha256"]
        version = found[package]["metadata"]["version"]
        if (name, package) == ("cpu", "torch"):
            if not version.endswith("+cpu"):
                raise SystemExit(f"pip found torch {version}; let it find a CPU build (PIP_EXTRA_INDEX_URL)")
            continue  # not on the package index: `make setup` installs it in its own step
        if "+" in version:
            raise SystemExit(f"{package} {version} is a local build; a lock holds published versions only")
        lines.append(f"{package}=={version} --hash=sha256:{sha256}")
    source.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    return len(lines) - 1


if __name__ == "__main__":
    for chosen in sys.argv[1:] or sorted(LEFT_OUT):
        print(f"requirements/{chosen}.txt: {lock(chosen)} packages")
