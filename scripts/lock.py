"""Writes requirements/{cpu,torch,gpu,dev}.txt from pyproject.toml: each package pinned with ==, with its hash.

`cpu` and `gpu` lock the runtime dependencies with the extra of that name and the extra `otel`. `dev` locks what the
tests, lint, baselines and the trainer need beyond `cpu`: the `dev` group, the extras `bench` and `train`. pip resolves
by a dry run over metadata. This file walks pip's report from the direct requirements, and writes the packages that it
reaches. It does not pass through the packages in LEFT_OUT.

Run by `make lock`, on Linux x86_64 with Python 3.11, since wheels and markers are those of this interpreter. pip must
find a CPU build of torch, so that cpu.txt gets no CUDA packages. That build has its own file torch.txt, because it is
not on the package index. Where pip does not find the build, `make setup` installs torch from gpu.txt.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
NAMES = ("cpu", "gpu", "dev")
# These packages come as builds for CUDA, which break `import transformers` beside a CPU torch ("operator
# torchvision::nms does not exist"). vLLM runs text models without these packages.
NO_CUDA = {"torchvision", "torchaudio", "torchcodec"}
LEFT_OUT = {"cpu": NO_CUDA, "gpu": set(), "dev": NO_CUDA}
TORCH_HEAD = (
    "# torch's build for CPUs, made from pyproject.toml by `make lock`: Linux x86_64, Python 3.11. "
    "Not on the package index."
)
RESOLVE = ("install", "--dry-run", "--ignore-installed", "--quiet", "--no-cache-dir", "--use-feature=fast-deps")


def wanted(name: str) -> list[str]:
    """Returns the requirements that a lock is made of. `dev` includes `cpu`, so that both agree on every version."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = data["project"]["optional-dependencies"]
    found = [*data["project"]["dependencies"], *extras["otel"], *extras["gpu" if name == "gpu" else "cpu"]]
    if name == "dev":
        found += [*extras["bench"], *extras["train"], *data["dependency-groups"]["dev"]]
    if name == "gpu":  # == would also match a CPU build of the version, === does not
        found = [line.replace("torch==", "torch===") if line.startswith("torch==") else line for line in found]
    return [line for line in found if not line.startswith("tailrace")]


def resolve(requirements: list[str]) -> list[dict]:
    """Returns the packages that pip would install: the `install` list of its report. Raises CalledProcessError if pip
    fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", *RESOLVE, "--report", str(report), *requirements]
        subprocess.run(command, check=True)
        return json.loads(report.read_text())["install"]


def reached(direct: list[Requirement], found: dict[str, dict], left_out: set[str]) -> set[str]:
    """Returns names of the packages that `direct` needs, directly or not, without passing through `left_out`."""
    seen, todo = set(), [(canonicalize_name(need.name), extra) for need in direct for extra in ("", *need.extras)]
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
    """Writes requirements/NAME.txt, and torch.txt with `cpu`. Returns the number of packages in NAME.txt. Raises
    SystemExit at a local build, or at a torch for CUDA in `cpu`.
    """
    requirements = wanted(name)
    found = {canonicalize_name(item["metadata"]["name"]): item for item in resolve(requirements)}
    packages = reached(list(map(Requirement, requirements)), found, LEFT_OUT[name])
    if name == "dev":  # cpu.txt has the runtime packages
        packages -= reached(list(map(Requirement, wanted("cpu"))), found, LEFT_OUT["cpu"])
    lines = [f"# {name}, made from pyproject.toml by `make lock`: Linux x86_64, Python 3.11. Install with --no-deps."]
    for package in sorted(packages):
        sha256 = found[package]["download_info"]["archive_info"]["hashes"]["sha256"]
        version = found[package]["metadata"]["version"]
        if (name, package) == ("cpu", "torch"):
            if not version.endswith("+cpu"):
                raise SystemExit(f"pip found torch {version}; let it find a CPU build (PIP_EXTRA_INDEX_URL)")
            (FOLDER / "torch.txt").write_text(f"{TORCH_HEAD}\ntorch=={version} --hash=sha256:{sha256}\n")
            continue
        if "+" in version:
            raise SystemExit(f"{package} {version} is a local build; a lock holds published versions only")
        lines.append(f"{package}=={version} --hash=sha256:{sha256}")
    (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return len(lines) - 1


if __name__ == "__main__":
    for chosen in sys.argv[1:] or NAMES:
        print(f"requirements/{chosen}.txt: {lock(chosen)} packages")
