#!/usr/bin/env bash
# From a bare Debian 12 to .venv and the demo model. Each finished step leaves a stamp in .venv (of the lock it
# installed), so an interrupted run resumes and a second run does nothing. Called by `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT
pip() { quietly .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
quietly() { "$@" >"$log" 2>&1 || { tail -n 3 "$log" >&2; return 1; }; } # the last words only, and only of a failure

command -v "$PYTHON" >/dev/null || fail "$PYTHON is not there; install Python 3.11, or name it: make setup PYTHON=..."

# System libraries that Mooncake asks for; the CPU build of vLLM needs libnuma too. A C++ compiler and Python's headers
# build arctic-inference, the one package that comes as source; only benchmarks and their tests need it.
missing=$("$PYTHON" - <<'EOF'
import ctypes, importlib.util, shutil, sysconfig
from pathlib import Path
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1",
             "libcurl.so.4": "libcurl4", "libstdc++.so.6": "libstdc++6"}
packages = [] if importlib.util.find_spec("ensurepip") else ["python3-venv"]
if not shutil.which("g++"):
    packages.append("g++")
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    packages.append("python3-dev")
for library, package in LIBRARIES.items():
    try:
        ctypes.CDLL(library)
    except OSError:
        packages.append(package)
print(" ".join(packages))
EOF
)
if [ -n "$missing" ]; then
    { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; } || fail "missing; run: sudo apt-get install -y $missing"
    say "installing $missing"
    # shellcheck disable=SC2086
    { quietly apt-get update && quietly env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends $missing; } || fail "apt-get could not install: $missing"
fi

locks="requirements/cpu.txt requirements/dev.txt"
# shellcheck disable=SC2086
stamp=.venv/.stamp-$(cat $locks requirements/torch.txt | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    .venv/bin/python -m pip --version >/dev/null 2>&1 || { say "making .venv"; "$PYTHON" -m venv --clear .venv; }
    for lock in $locks; do
        say "installing $lock ($([ "$lock" = requirements/cpu.txt ] && echo "about 600 MB" || echo "one package is compiled"))"
        pip install --no-deps --require-hashes -r "$lock" || fail "$lock did not install; make setup resumes"
    done
    # torch last, and by itself: its CPU build is not on the package index. Where pip knows no such build, the one for
    # CUDA comes with what it needs (several GB), as locked for GPUs. A build with another hash is an error.
    say "installing requirements/torch.txt"
    if ! pip install --no-deps --require-hashes -r requirements/torch.txt; then
        grep -q "No matching distribution" "$log" || fail "requirements/torch.txt did not install; make setup resumes"
        say "pip knows no CPU build of torch; installing the one for CUDA (several GB)"
        pip install --no-deps --require-hashes -r <(grep -E '^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==' \
            requirements/gpu.txt) || fail "torch did not install; make setup resumes"
    fi
    say "importing the packages"
    quietly .venv/bin/python -c "import torch, vllm, ray, transformers, mooncake.store, arctic_inference.suffix_decoding" ||
        fail "a package does not import; make clean setup starts afresh"
    rm -f .venv/.stamp-*
    touch "$stamp"
fi
# The package itself, editable: `tailrace` and `import tailrace` work from any folder, Ray's workers included.
installed=.venv/.package-$(sha256sum pyproject.toml | cut -c1-16)
if [ ! -e "$installed" ]; then
    say "installing tailrace (editable)"
    pip install --no-deps --no-build-isolation -e . || fail "tailrace did not install; make setup resumes"
    rm -f .venv/.package-*
    touch "$installed"
fi
.venv/bin/tailrace model
if ! ls deployments/draft_index/__pycache__/*.nbi >/dev/null 2>&1; then
    say "compiling the draft index" # once, and not in every engine that starts first
    quietly .venv/bin/python -c "from tailrace.deployments.draft_index.group_index import warm_up; warm_up()" ||
        fail "the draft index did not compile"
fi
say "ready"
