"""Downloads wheels of the lock's versions, for the Python of the machine with the GPU, once for each name and
version.
"""

import subprocess
import sys
from pathlib import Path

from gpu_pack.carried import PYTHON, version_of

GLIBCS = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBCS]
PLATFORMS += [f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
ABIS = (f"cp{PYTHON.replace('.', '')}", "abi3", "none")


class NotFetched(Exception):
    """pip did not get a wheel; the text is pip's last line, or names the wheel."""


def wheel_of(folder: Path, name: str, version: str) -> Path | None:
    """Returns a package's wheel in a folder, or None."""
    found = sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found else None


def fetch(folder: Path, names: list[str], lock: str) -> dict[str, Path]:
    """Downloads the wheels that the folder lacks. Returns all wheels by name. Raises NotFetched, or ValueError if the
    lock has no pin.
    """
    folder.mkdir(parents=True, exist_ok=True)
    versions = {name: version_of(name, lock) for name in names}
    wanted = [f"{name}=={version}" for name, version in versions.items() if wheel_of(folder, name, version) is None]
    if wanted:
        _download(folder, wanted)
    found = {name: wheel_of(folder, name, version) for name, version in versions.items()}
    for name, path in found.items():
        if path is None:
            raise NotFetched(f"{name}=={versions[name]}: pip fetched no wheel under this name")
    return found


def _download(folder: Path, wanted: list[str]) -> None:
    kinds = [word for platform in PLATFORMS for word in ("--platform", platform)]
    kinds += [word for abi in ABIS for word in ("--abi", abi)]
    fixed = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", *fixed, *kinds]
    run = subprocess.run([*command, "-d", str(folder), *wanted], capture_output=True, text=True, check=False)
    if run.returncode:
        raise NotFetched((run.stderr.strip().splitlines() or ["pip download failed"])[-1])
