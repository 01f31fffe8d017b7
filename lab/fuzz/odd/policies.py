"""Policies with the errors of users: built-in ones that raise, or return nonsense, during a fault.

Their dotted paths go through the registry as a user's own do.
"""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr

from tailrace.policies.families.registry import load_policy


def _raise(value: Any) -> Any:
    raise ZeroDivisionError("float division by zero")


def _first_number(value: Any, number: float | str) -> Any:
    """Returns the value with its first number replaced, also inside tuples."""
    if not isinstance(value, tuple):
        return number
    return (_first_number(value[0], number), *value[1:]) if value else value


NONSENSE: tuple[Callable[[Any], Any], ...] = (
    _raise,
    lambda value: None,
    lambda value: "nonsense",
    lambda value: (),
    lambda value: (value, value),
    lambda value: _first_number(value, -3),
    lambda value: _first_number(value, 0),
    lambda value: _first_number(value, 10**12),
    lambda value: _first_number(value, float("nan")),
    lambda value: _first_number(value, "nobody"),
)


class Trouble:
    """The present trouble: a family of policies, and the number of its nonsense. One simulation at a time runs in a
    process."""

    family: str | None = None
    number: int = 0

    @classmethod
    def of(cls, family: str, value: Any) -> Any:
        return NONSENSE[cls.number % len(NONSENSE)](value) if cls.family == family else value


class _Odd(BaseModel):
    """A built-in policy, `like`, with trouble."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    like: dict
    _policy: Any = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._policy = load_policy(type(self).__name__.removeprefix("Odd").lower(), self.like)


class OddOrdering(_Odd):
    @property
    def lanes(self) -> int:
        return self._policy.lanes

    @property
    def growing_lanes(self) -> tuple[int, ...]:
        return self._policy.growing_lanes

    def keys(self, sample, group):
        return Trouble.of("ordering", self._policy.keys(sample, group))

    def lane(self, pick):
        return self._policy.lane(pick)

    def bind(self, group, groups, replicas):
        return Trouble.of("bind", self._policy.bind(group, groups, replicas))


class OddPlacement(_Odd):
    @property
    def sticky(self) -> bool:
        return self._policy.sticky

    def choose(self, sample, need_tokens, replicas, memory):
        return Trouble.of("placement", self._policy.choose(sample, need_tokens, replicas, memory))

    def min_pull_tokens(self, performance, running):
        return Trouble.of("pull", self._policy.min_pull_tokens(performance, running))


class OddChunking(_Odd):
    def tokens(self, sample):
        return Trouble.of("chunking", self._policy.tokens(sample))


class OddLengths(_Odd):
    @property
    def reads_all(self) -> bool:
        return self._policy.reads_all

    def expected(self, group, generated):
        return Trouble.of("lengths", self._policy.expected(group, generated))


class OddFairness(_Odd):
    @property
    def apart(self) -> bool:
        return self._policy.apart

    def key(self, batch):
        return Trouble.of("fairness", self._policy.key(batch))


class OddTail(_Odd):
    def wanted(self, view, memory):
        return Trouble.of("tail", self._policy.wanted(view, memory))


TROUBLES = ("ordering", "bind", "placement", "pull", "chunking", "lengths", "fairness", "tail")
ODD = {cls.__name__.removeprefix("Odd").lower(): cls for cls in _Odd.__subclasses__()}
DEFAULTS = {"lengths": {"type": "max_finished"}, "tail": {"type": "hold"}}


def oddly(policies: dict[str, dict]) -> dict[str, dict]:
    """Returns the configuration with every policy that can have trouble in its odd form."""
    like = DEFAULTS | policies
    return like | {
        family: {"type": f"{__name__}:{cls.__name__}", "args": {"like": like[family]}} for family, cls in ODD.items()
    }
