"""Names of the samples of HTTP requests: the part of their keys that is not the prompt.

Tokens depend on weights, prompt, sampling parameters and (seed, step, group, index, turn). The headers
`X-Tailrace-Seed`, `-Step`, `-Group`, `-Index` and `-Turn` give them; `-Hold` gives the seconds for which a sample is
held for its next turn. Without a group it is that of equal prompts; without an index it is the request's `seed`, or
drawn here, and the answer contains it. The samples of one prompt of a request have consecutive indexes, which
begin with the same one for each of its prompts.
"""

import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from tailrace.app.calls.session import prompt_name
from tailrace.deployments.messages.rollout import BatchSettings
from tailrace.deployments.messages.session import MAX_INDEX

HEADERS = {name: f"x-tailrace-{name}" for name in ("seed", "step", "group", "index", "turn", "hold")}


DRAWN = -1
"""Seed that means none, in vLLM. Other negative seeds are seeds."""


class Naming(NamedTuple):
    """`index`: index of the first sample of the request. `weights_version`: the only one under which it may begin.
    `branches`: see SampleRequest.
    """

    seed: int
    step: int
    group: str | None
    index: int
    turn: int = 0
    hold_s: int = 0
    weights_version: int | None = None
    branches: bool = False

    @classmethod
    def of(cls, headers: Mapping[str, str], request_seed: int | None) -> "Naming":
        """Reads the names from the headers. Raises ValueError that names the header."""
        index = _number(headers, "index")
        if index is None:
            drawn = request_seed in (None, DRAWN)
            index = secrets.randbelow(MAX_INDEX // 2) if drawn else index_of(request_seed)
        seed, step, turn, hold_s = (_number(headers, name) or 0 for name in ("seed", "step", "turn", "hold"))
        return cls(seed, step, _text(headers, "group"), index, turn, hold_s)

    def group_of(self, prompt: Mapping) -> str:
        return prompt_name(prompt) if self.group is None else self.group

    def named(self, prompt: Mapping) -> "Naming":
        """Returns the names with the group of a prompt. Takes long for features, so call it on a thread."""
        return self._replace(group=self.group_of(prompt))

    def sample(self, prompt: Mapping, number: int) -> str:
        """Returns the name of the turn of one of the samples of a prompt."""
        return f"{self.seed}/{self.step}/{self.group_of(prompt)}/{self.index + number}/{self.turn}"

    def session(self) -> BatchSettings:
        """Returns the settings of the session that such requests share, on all replicas of the gateway."""
        name, version = f"http-{self.seed}-{self.step}", self.weights_version
        return BatchSettings(batch_id=name, seed=self.seed, step=self.step, weights_version=version)


def index_of(seed: int) -> int:
    """Returns the index of a sample by the seed of its request: the seed itself, unless it is negative or too large."""
    if 0 <= seed <= MAX_INDEX // 2:
        return seed
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=4).digest()) % (MAX_INDEX // 2)


def _text(headers: Mapping[str, str], name: str) -> str | None:
    """Decodes UTF-8 in the header's bytes, which ASGI servers read as Latin-1."""
    text = headers.get(HEADERS[name])
    try:
        return None if text is None else text.encode("latin-1").decode()
    except ValueError as error:
        raise ValueError(f"header {HEADERS[name]}: it is not UTF-8") from error


def _number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(HEADERS[name])
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) > MAX_INDEX:
        raise ValueError(f"header {HEADERS[name]}: {text[:20]!r} is not a number from 0 to {MAX_INDEX}")
    return int(text)
