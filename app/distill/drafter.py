"""Makes a drafter's folder from a target's: cut, trained, measured before and after, written to a temporary folder and
renamed.

Invariant: a folder made here is whole; an interrupted run leaves none. Called by `app distill-drafter`.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from tailrace.app.distill.texts import Texts
from tailrace.app.errors import BadInput, Failed
from tailrace.app.strict_json import parse_object
from tailrace.deployments.vllm_exact.tokenizer_check import vocabulary_refusal

PLACES = 1000
"""Number of held-out places for the figures before and after."""

FIGURES = "distillation.json"
"""File of the measurements, next to the weights."""

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")


class Course(NamedTuple):
    """Plan of a drafter's training: ends after `steps` or `minutes`, whichever comes first. `temperature`: of both
    distributions.
    """

    layers: int
    steps: int
    minutes: float
    temperature: float
    seed: int


def make_drafter(model: Path, texts: Texts, out: Path, course: Course, said: Callable) -> dict:
    """Teaches a drafter and writes it to `out`, an ordinary Hugging Face folder. Returns the figures.

    `out` must not exist. `said`: called with each `teaching.Said`. Raises BadInput if the model cannot be cut this way.
    """
    import torch

    from tailrace.app.distill.layers import cut
    from tailrace.app.distill.teaching import Teaching

    began_s = time.monotonic()
    torch.manual_seed(course.seed)
    target = _load(model)
    drafter = cut(target, course.layers)
    teaching = Teaching(target, drafter, course.temperature, course.seed)
    before = teaching.measure(texts.held_out, PLACES)
    last = None
    for last in teaching.teach(texts.taught, texts.held_out, course.steps, 60 * course.minutes):
        said(last)
    after = teaching.measure(texts.held_out, PLACES)
    figures = {
        "target": model.name,
        "layers": course.layers,
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
        "steps": last.steps,
        "seconds": round(time.monotonic() - began_s, 1),
        "temperature": course.temperature,
        "texts": {"taught": len(texts.taught), "held_out": len(texts.held_out)},
        **{name: _rounded(value) for name, value in (("before", before), ("after", after))},
    }
    _write(model, drafter, out, figures)
    return {"out": str(out), **figures}


def measured(folder: Path) -> float | None:
    """Returns the acceptance of drafts of a model made here, drawn with shared noise, or None for another model."""
    try:
        return float(parse_object((folder / FIGURES).read_bytes())["after"]["shared"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / FIGURES}: not what `distill-drafter` writes: {error!r}") from error


def _rounded(value) -> dict[str, float]:
    return {name: round(number, 4) for name, number in value._asdict().items()}


def _load(model: Path):
    """Loads the model in float32, whatever its folder says, since updates are small."""
    import torch
    from transformers import AutoModelForCausalLM

    with redirect_stderr(StringIO()):  # transformers draws a progress bar here that nothing turns off
        return AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32)


def _write(model: Path, drafter, out: Path, figures: dict) -> None:
    """Writes weights and config.json of the drafter, with copies of the target's other files. Appears by one rename."""
    import torch
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(model, local_files_only=True).dtype or torch.float32
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        made = Path(folder) / "made"
        with redirect_stderr(StringIO()):
            drafter.to(dtype).save_pretrained(made)
        for path in model.iterdir():
            if path.is_file() and path.name != "config.json" and not path.name.endswith(WEIGHTS):
                shutil.copy(path, made)
        (made / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
        refusal = vocabulary_refusal(model, made)
        if refusal:
            raise Failed(refusal)
        made.rename(out)
