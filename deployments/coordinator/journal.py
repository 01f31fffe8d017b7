"""Journal of a live core: its events and its decisions as JSON lines, which a fresh core must reproduce (law 4).

The first line is a header with policies and versions. Each further line is an event, or a tick with its actions, in
order: objects by the name of their dataclass, enums by value, tuples as lists. Invariant: a journal has no gaps, since
a core is a function of all its events. After MOST_ENTRIES entries nothing is kept, and the header counts the dropped
entries. `Rollouts` uses a `JournaledCore` while a driver wants a journal; tests and people replay it.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

from pydantic import TypeAdapter, ValidationError

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import Action
from tailrace.policies.protocol.events import Event, Tick
from tailrace.policies.protocol.exactness import Exactness

FORMAT = 1

MOST_ENTRIES = 500_000
"""Maximum number of events and ticks, about 200 MB. Two replicas make ten in a second, 512 some thousands."""

_KINDS = {kind.__name__: TypeAdapter(kind) for kind in (*get_args(Event), *get_args(Action), Tick)}


class Decision(NamedTuple):
    """A tick and the actions that the core returned for it."""

    tick: Tick
    actions: tuple[Action, ...]


class JournaledCore(RolloutCore):
    """A core that records its events and actions. An illegal event changes nothing and is not recorded."""

    def __init__(
        self,
        policies: Policies,
        weights_version: int = 0,
        limits: Limits | None = None,
        exactness: Exactness = "bits",
    ):
        super().__init__(policies, weights_version, limits, exactness)
        self._began_at, self._limits, self._exactness = weights_version, limits, exactness
        self._entries, self._dropped, self._stopped = [], 0, False

    def observe(self, event: Event) -> None:
        super().observe(event)
        self._write(event)

    def decide(self, tick: Tick) -> tuple[Action, ...]:
        actions = super().decide(tick)
        self._write(Decision(tick, actions))
        return actions

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def journal(self) -> str:
        """Returns the journal as text: a header, then one line per entry."""
        header = {
            "journal": FORMAT,
            "policies": self.policies.model_dump(mode="json"),
            "weights_version": self._began_at,
            "limits": self._limits,
            "exactness": self._exactness,
            "dropped": self._dropped,
        }
        return "".join(json.dumps(line) + "\n" for line in (header, *map(_line, self._entries)))

    def stop(self) -> None:
        """Stops recording, and drops the entries."""
        self._stopped, self._dropped = True, self._dropped + len(self._entries)
        self._entries.clear()

    def _write(self, entry: Event | Decision) -> None:
        if not self._stopped and len(self._entries) < MOST_ENTRIES:
            self._entries.append(entry)
        else:
            self._dropped += 1


def _line(entry: Event | Decision) -> dict:
    if isinstance(entry, Decision):
        return _named(entry.tick) | {"actions": list(map(_named, entry.actions))}
    return _named(entry)


def _named(value: Event | Action | Tick) -> dict:
    return {type(value).__name__: asdict(value)}


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal that was read back. `limits`, `exactness`: see `RolloutCore`. `dropped`: number of entries that came
    after the last of these and were not kept.
    """

    policies: Policies
    weights_version: int
    limits: Limits | None
    exactness: Exactness
    dropped: int
    entries: tuple[Event | Decision, ...]


def read_journal(lines: Iterable[str]) -> Journal:
    """Reads a journal. Raises ValueError, which names the line, unless it is exactly as `JournaledCore` writes it."""
    header, entries = None, []
    for number, text in enumerate(lines, start=1):
        try:
            data = json.loads(text)
            if number == 1:
                header = _header(data)
            else:
                entries.append(_entry(data))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number}: not a line of a journal: {str(error).splitlines()[0]}") from error
    if header is None:
        raise ValueError("line 1: not a line of a journal: there is none")
    return Journal(*header, tuple(entries))


HEADER = {"journal", "policies", "weights_version", "limits", "exactness", "dropped"}


def _header(data: dict) -> tuple[Policies, int, Limits | None, Exactness, int]:
    data = {"exactness": "bits"} | data  # older journals know no other level
    if set(data) != HEADER or data["journal"] != FORMAT or data["exactness"] not in get_args(Exactness):
        raise ValueError(f"a header of format {FORMAT} is needed")
    for family, policy in data["policies"].items():
        module, colon, _ = (policy if isinstance(policy, str) else policy.get("type", "")).partition(":")
        if colon and module not in sys.modules:
            raise ValueError(f"policies.{family} is of module {module}; a journal imports no code, import it first")
    limits = None if data["limits"] is None else Limits(*map(int, data["limits"]))
    versions = int(data["weights_version"]), limits, data["exactness"], int(data["dropped"])
    return Policies(**data["policies"]), *versions


def _entry(data: dict) -> Event | Decision:
    named = {name: fields for name, fields in data.items() if name != "actions"}
    first = _object(named)
    if not isinstance(first, Tick):
        if "actions" in data or isinstance(first, get_args(Action)):
            raise ValueError("an event is needed, or a Tick with its actions")
        return first
    actions = tuple(map(_object, data["actions"])) if "actions" in data else None
    if actions is None or not all(isinstance(action, get_args(Action)) for action in actions):
        raise ValueError("a Tick stands with its actions")
    return Decision(first, actions)


def _object(data: dict) -> Any:
    ((name, fields),) = data.items()
    if name not in _KINDS:
        raise ValueError(f"{name!r} is neither an event nor an action")
    try:
        value = _KINDS[name].validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{name}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if not _holds(json.loads(json.dumps(asdict(value))), fields):  # an unknown key, a number in quotes
        raise ValueError(f"{name}: other fields than {', '.join(asdict(value))}, or values of other kinds")
    return value


def _holds(known: Any, fields: Any) -> bool:
    """Returns whether an object has these fields. Fields added since the journal was written have their defaults."""
    if isinstance(known, dict) and isinstance(fields, dict):
        return all(key in known and _holds(known[key], value) for key, value in fields.items())
    if isinstance(known, list) and isinstance(fields, list):
        return len(known) == len(fields) and all(map(_holds, known, fields))
    return known == fields


class Difference(NamedTuple):
    """The first difference of a replay: the line of the journal, and both answers."""

    line: int
    expected: tuple[Action, ...]
    got: tuple[Action, ...]


def replay(journal: Journal) -> Difference | None:
    """Replays a journal on a fresh core. Returns the first difference, or None if all answers are the same. Raises
    IllegalEvent for an event that is impossible after this core's decisions.
    """
    core = RolloutCore(journal.policies, journal.weights_version, journal.limits, journal.exactness)
    for line, entry in enumerate(journal.entries, start=2):
        if not isinstance(entry, Decision):
            core.observe(entry)
        elif (got := core.decide(entry.tick)) != entry.actions:
            return Difference(line, entry.actions, got)
    return None
