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
pip() { quietly env PYTHONUNBUFFERED=1 .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
installing() { # words, lock: installs it, and says ten times how far it is; on a terminal in one line
    local words=$1 all here unpacked before shown=0 pid
    all=$(grep -c == "$2")
    before=$(find .venv/lib -name '*.dist-info' 2>/dev/null | wc -l)
    pip install --no-deps --require-hashes -r "$2" & pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        here=$(grep -cE '^(Collecting|Processing|Requirement already)' "$log" || true)
        unpacked=$(($(find .venv/lib -name '*.dist-info' 2>/dev/null | wc -l) - before))
        [ "$(((here + unpacked) * 5 / all))" -gt "$shown" ] || continue
        shown=$(((here + unpacked) * 5 / all))
        progress "$words: $all packages, $here here, $unpacked unpacked"
    done
    if [ -t 1 ]; then echo; fi
    wait "$pid"
}
progress() { if [ -t 1 ]; then printf '\rsetup: %-70s' "$1"; else say "$1"; fi; }
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
    say "about 4 minutes on two idle cores, once; if it is interrupted, the next one resumes"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || { say "1 of 6: making .venv"; "$PYTHON" -m venv --clear .venv; }
    installing "2 of 6: requirements/cpu.txt, about 600 MB" requirements/cpu.txt ||
        fail "requirements/cpu.txt did not install; make setup resumes"
    installing "3 of 6: requirements/dev.txt, one is compiled" requirements/dev.txt ||
        fail "requirements/dev.txt did not install; make setup resumes"
    # torch last, and by itself: its CPU build is not on the package index. Where pip knows no such build, the one for
    # CUDA comes with what it needs (several GB), as locked for GPUs. A build with another hash is an error.
    say "4 of 6: torch"
    if ! pip install --no-deps --require-hashes -r requirements/torch.txt; then
        grep -q "No matching distribution" "$log" || fail "requirements/torch.txt did not install; make setup resumes"
        say "pip knows no CPU build of torch; installing the one for CUDA (several GB)"
        pip install --no-deps --require-hashes -r <(grep -E '^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==' \
            requirements/gpu.txt) || fail "torch did not install; make setup resumes"
    fi
    say "5 of 6: importing the packages"
    quietly .venv/bin/python -c "import torch, vllm, ray, transformers, mooncake.store, arctic_inference.suffix_decoding" ||
        fail "a package does not import; make clean setup starts afresh"
    rm -f .venv/.stamp-*
    touch "$stamp"
    say "6 of 6: tailrace itself, and the demo model (98 MB)"
fi
# The package itself, editable: `tailrace` and `import tailrace` work from any folder, Ray's workers included.
installed=.venv/.package-$(sha256sum pyproject.toml | cut -c1-16)
if [ ! -e "$installed" ]; then
    say "installing tailrace (editable)"
    pip install --no-deps --no-build-isolation -e . || fail "tailrace did not install; make setup resumes"
    rm -f .venv/.package-*
    touch "$installed"
fi
# Kernels are compiled once, here, beside the model, and not by every engine and test that starts first.
kernels=$(cat deployments/draft_index/*.py deployments/vllm_exact/*_cpu.py | sha256sum | cut -c1-16)
if [ ! -e "deployments/draft_index/__pycache__/.kernels-$kernels" ]; then
    say "compiling kernels, a minute"
    .venv/bin/python scripts/compile_kernels.py & compiling=$!
fi
.venv/bin/tailrace model
if [ -n "${compiling:-}" ]; then
    wait "$compiling" || fail "the kernels did not compile"
    rm -f deployments/draft_index/__pycache__/.kernels-*
    touch "deployments/draft_index/__pycache__/.kernels-$kernels"
fi
say "ready"
