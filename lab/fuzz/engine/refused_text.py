"""Checks of a refusal's text: one line that names the field, not too long, of characters that every stream can send."""

import re

from tailrace.lab.fuzz.engine.fields import BATCH_FIELDS, CHUNK, GROUP, SAMPLING, SESSION_FIELDS

MAX_CHARACTERS = 1_000
FIELDS = frozenset((*SAMPLING, *GROUP, *SESSION_FIELDS, *BATCH_FIELDS, *CHUNK))
OTHER_NAMES = "prompt", "context", "answer", "wants weights", "already running"
"""Words that name the input where no single field is at fault."""

NAMES = re.compile(rf"\b({'|'.join((*FIELDS, *OTHER_NAMES))})\b")
"""Names as whole words: `of`, `text` and `step` are parts of many others."""


def printable(text: str) -> str:
    """Returns the text with half surrogate pairs escaped, since no stream takes them."""
    return text.encode(errors="backslashreplace").decode()


def fault(text: str) -> str | None:
    """Returns in one line why people cannot read a refusal, or None."""
    if not text.strip() or len(text.splitlines()) != 1:
        return f"it has {len(text.splitlines())} lines: {text[:300]!r}"
    if len(text) > MAX_CHARACTERS:
        return f"it has {len(text)} characters: {text[:200]!r}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"it is no Unicode: {text[:300]!r}"
    if NAMES.search(text) is None:
        return f"it names no field: {text[:300]!r}"
    return None
