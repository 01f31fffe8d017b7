"""A journal's lines as the events and actions of a core, in order, whichever core wrote it.

A replay needs every field to be as this version writes it (`deployments/coordinator/journal.py`); a timeline needs
times, ids and tokens. Unknown kinds of entries and unused fields are therefore passed on unread, and journals of older
and newer cores can be drawn. Called by `lab/timeline/record.py`.
"""

import json
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import NamedTuple


class Entry(NamedTuple):
    """`fields` of an event or action, as attributes; `now`: its time, monotonic seconds."""

    line: int
    now: float
    kind: str
    fields: SimpleNamespace


def _header(data: dict) -> SimpleNamespace:
    began_at = int(data.get("weights_version", 0))
    exactness = data.get("exactness", "bits")  # older journals know no other level
    return SimpleNamespace(
        format=data["journal"], dropped=int(data["dropped"]), weights_version=began_at, exactness=exactness
    )


def entries(lines: Iterable[str]) -> Iterator[Entry]:
    """Yields the entries, first the header, as an entry of kind `journal`. Raises ValueError that names the line."""
    number = 0
    for number, text in enumerate(lines, start=1):
        try:
            data = json.loads(text)
            if number == 1:
                yield Entry(1, 0.0, "journal", _header(data))
                continue
            ((kind, fields),) = ((name, value) for name, value in data.items() if name != "actions")
            now = float(fields["now"])
            yield Entry(number, now, kind, SimpleNamespace(**fields))
            for action in data.get("actions", ()):
                ((kind, fields),) = action.items()
                yield Entry(number, now, kind, SimpleNamespace(**fields))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"line {number}: not a line of a journal") from error
    if not number:
        raise ValueError("line 1: not a line of a journal: there is none")
