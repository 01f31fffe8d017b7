"""Mooncake's client and programs, with the libraries of the system that a bare machine lacks.

Mooncake links an etcd library and libcurl, and calls them only with etcd or with a metadata server over HTTP. Stubs
replace both libraries. gcc, nm, dpkg and Debian's apt-get are needed.
"""

import shutil
import subprocess
import zipfile
from pathlib import Path

from gpu_pack.layout import extract

PROGRAMS = ("mooncake_client", "mooncake_master")
BINARIES = ("store.so", "engine.so", *PROGRAMS)
FILES = (*BINARIES, "libasio.so")
TOOLS = ("gcc", "nm", "apt-get", "dpkg")

DEBIAN = ("libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200", "libnuma1")
LIBRARIES = ("libmlx5.so.1", "libibverbs.so.1", "libnuma.so.1", "libnl-route-3.so.200", "libnl-3.so.200")
"""Names of libraries in the packages DEBIAN."""

ETCD = ("Etcd", "NewEtcd", "NewStoreEtcd")
WRAPPER = """#!/bin/sh
here=$(dirname "$0")
LD_LIBRARY_PATH="$here/../system" exec "$here/{name}.bin" "$@"
"""


class NotHere(Exception):
    """A tool or a package of the system is missing; the text names it."""


def missing_tool() -> str | None:
    """Returns the name of a tool that is not installed, or None."""
    return next((name for name in TOOLS if shutil.which(name) is None), None)


def lay_out_pool(site: Path, wheel: Path, work: Path) -> None:
    """Adds the pool's files to the site folder, and a folder `system` of libraries. Raises NotHere if a package or a
    library of the system is missing.
    """
    with zipfile.ZipFile(wheel) as file:
        libraries = {path for path in file.namelist() if ".libs/" in path}
    etcd = {path for path in libraries if "etcd" in path}
    extract(wheel, site, lambda path: _wanted(path) or path in libraries - etcd)
    folder, system = site / "mooncake", site / "system"
    system.mkdir()
    for name in BINARIES:
        (folder / name).chmod(0o755)
    undefined = _undefined([folder / name for name in BINARIES])
    calls = [name for name in undefined if name.startswith(ETCD)]
    for path in (folder / "libetcd_wrapper.so", *(site / name for name in etcd)):
        _stub(path, calls, "long {}(void) {{ return -1; }}")
    curl = [name for name in undefined if name.startswith("curl_")]
    _stub(system / "libcurl.so.4", curl, "void *{}(void) {{ return 0; }}")
    for name in PROGRAMS:  # a wrapper sets the library path: programs are started without an environment
        (folder / name).rename(folder / f"{name}.bin")
        (folder / name).write_text(WRAPPER.format(name=name))
        (folder / name).chmod(0o755)
    _debian(system, work / "debian")


def _wanted(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return (folder == "mooncake" and name in FILES) or (path.startswith("mooncake/") and name.endswith(".py")) or (
        ".dist-info/" in path
    )  # fmt: skip


def _undefined(paths: list[Path]) -> list[str]:
    """Returns the names of functions that these libraries call and do not define."""
    command = ["nm", "-D", "--undefined-only", *map(str, paths)]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return sorted({word.split("@")[0] for word in words})


def _stub(path: Path, names: list[str], form: str) -> None:
    """Compiles a library whose functions do nothing."""
    source = path.with_suffix(".c")
    source.write_text("\n".join(map(form.format, names)))
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
    subprocess.run(["gcc", *flags, "-o", str(path), str(source)], check=True)
    source.unlink()


def _debian(system: Path, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(["apt-get", "download", "-qq", *DEBIAN], cwd=work, capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NotHere(f"apt-get download: {last}; run `apt-get update`, or leave out the pool (--without-pool)")
    for package in work.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(work / "files")], check=True)
    for name in LIBRARIES:
        found = next((work / "files").rglob(name), None)
        if found is None:
            raise NotHere(f"{name}: in none of {', '.join(DEBIAN)}")
        shutil.copy(found.resolve(), system / name)
