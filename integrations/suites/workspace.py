"""A folder in which the tests of a checkout run: copies of them that name the model of the server under test.

Invariant: nothing of the checkout is changed, and the package is the installed one, never that of the checkout. For
`suite.py`.
"""

import re
from pathlib import Path


class NoCheckout(ValueError):
    """The path is not a checkout with the tests of a suite."""


def check(checkout: Path, suite: dict) -> None:
    """Raises NoCheckout, in one line, unless the suite's files are there."""
    if missing := [name for name in suite["files"] if not (checkout / "tests" / name).is_file()]:
        raise NoCheckout(
            f"{checkout} has no tests/{missing[0]}: give {suite['package']}, a checkout or its unpacked source archive"
        )


def substituted(text: str, models: list[str], name: str) -> str:
    """The text with `name` where it names one of the models, longest names first, and whole names alone."""
    for model in sorted(models, key=len, reverse=True):
        text = re.sub(rf"(?<=[\"'])(?:hf-internal-testing/)?{re.escape(model)}(?=[\"'])", name, text)
    return text


def make(folder: Path, checkout: Path, suite: dict, model: Path) -> None:
    """Fills the folder: tests/, and the model's folder under the name by which servers know it."""
    for name in suite["copied"]:
        root = checkout / "tests" / name
        for source in sorted(root.rglob("*.py")) if root.is_dir() else (root,):
            copy = folder / "tests" / source.relative_to(checkout / "tests")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(substituted(source.read_text(), suite["models"], model.name))
    (folder / model.name).symlink_to(model)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -W ignore\n")
