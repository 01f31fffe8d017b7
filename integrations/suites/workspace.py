"""A folder in which vLLM's tests run: copies of them that name the model of the server under test.

Invariant: nothing of the checkout is changed, and vLLM is the installed one, never the checkout's. Used by `suite.py`.
"""

import re
import shutil
from pathlib import Path

FOLDERS = ("entrypoints", "tool_use")


class NoCheckout(ValueError):
    """The path is not a checkout of vLLM with its tests."""


def check(checkout: Path, files: list[str]) -> None:
    """Raises NoCheckout, in one line, unless the files are there."""
    if not (checkout / "tests/utils.py").is_file():
        raise NoCheckout(f"{checkout} has no tests/utils.py: give a checkout of vLLM, or its unpacked source archive")
    if missing := [name for name in files if not (checkout / "tests" / name).is_file()]:
        raise NoCheckout(f"{checkout} has no tests/{missing[0]}: give vLLM at v0.32.0")


def substituted(text: str, models: list[str], name: str) -> str:
    """The text with `name` where it names one of the models, longest names first, and whole names alone."""
    for model in sorted(models, key=len, reverse=True):
        text = re.sub(rf"(?<=[\"'])(?:hf-internal-testing/)?{re.escape(model)}(?=[\"'])", name, text)
    return text


def make(folder: Path, checkout: Path, models: list[str], model: Path) -> None:
    """Fills the folder: tests/, and the model's folder under the name by which servers know it."""
    for source in (checkout / "tests/__init__.py", checkout / "tests/utils.py"):
        (folder / "tests").mkdir(exist_ok=True)
        shutil.copy(source, folder / "tests")
    for name in FOLDERS:
        for source in sorted((checkout / "tests" / name).rglob("*.py")):
            copy = folder / "tests" / source.relative_to(checkout / "tests")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(substituted(source.read_text(), models, model.name))
    (folder / model.name).symlink_to(model)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q --noconftest\n")
