"""The worlds of a run by seed, each with its share of the seeds.

Invariant: each world is drawn from a stream of its own, so that no other choice of a seed depends on it.
"""

from dataclasses import dataclass
from random import Random

WORLDS = {
    "quotas": 0.25,
    "grown": 0.3,
    "scarce": 0.2,
    "early": 0.15,
    "turns": 0.15,
    "overtaking": 0.4,
    "races": 0.15,
    "rewards": 0.15,
    "lanes": 0.2,
    "finish": 0.2,
    "trajectories": 0.2,
}
"""Worlds, each with its share of seeds. For `grown` (batches that grow while they run) and `overtaking` (two updates of
the weights at about the same time, of a driver that gives updates) it is the share of drivers. `scarce`: each replica
has KV for a few samples, so that others wait. `early`: a driver whose samples end early. `turns`: a driver whose
samples have turns that come late, twice or too early. `races`: copies of chunks, by other draft methods, on replicas of
other speeds. `rewards`: a driver whose rewards take seconds. `lanes`: samples have lanes as soon as two answers are
known. `finish`: samples end under the weights that they began with, also if coordinators alone are lost.
`trajectories`: samples of several turns begin as KV has room for them, from one to nearly all at once."""

SCARCE_BLOCKS = 26
"""Number of KV blocks of a replica: enough for the longest sample and its chunk."""

ALWAYS = ":always"
"""Ends the kind of a world that every seed has."""

GUESTS = "early", "turns", "rewards"
MOST_OF_GUESTS = 4, 800
"""Maximum number of samples and of tokens that a guest requests at once."""

CALM_SHARE = 0.5
"""Share of the runs with a guest whose faults are left out."""

ROOM = 1.0, 1.0, 1.3, 2.0
"""Factors of a quota over the largest batch or request of a run."""


@dataclass(frozen=True)
class WorldPlan:
    """Worlds of a run. `quotas`: factors of samples and tokens over those of the largest batch, or None without quotas.
    `guests`: worlds that have a driver of their own. `is_calm`: whether the seed's faults are left out, so that times
    can be checked."""

    quotas: tuple[float | None, float | None] | None = None
    guests: tuple[str, ...] = ()
    is_calm: bool = False

    def bounds(self, samples: int, tokens: int) -> dict[str, int]:
        """Returns the quotas in force. `samples`, `tokens`: those of the largest batch."""
        whole = {"max_samples": samples, "max_tokens": tokens}
        return {
            name: int(size * over)
            for (name, size), over in zip(whole.items(), self.quotas or (), strict=False)
            if over is not None
        }


class Worlds:
    """Choices of a seed among these kinds, which may end in `ALWAYS`."""

    def __init__(self, seed: int, kinds: tuple[str, ...]):
        self._seed, self._kinds = seed, kinds

    def chosen(self, kind: str, name: str = "") -> Random | None:
        """Returns the stream of a world if the seed has it, for a driver of this name if one is given, else None."""
        rng = Random(f"{self._seed}:{kind}:{name}")
        share = 1.0 if kind + ALWAYS in self._kinds else WORLDS[kind] * (kind in self._kinds)
        return rng if rng.random() < share else None

    def plan(self) -> WorldPlan:
        quotas = self.chosen("quotas")
        chosen = {kind: self.chosen(kind) for kind in GUESTS}
        present = {kind: rng for kind, rng in chosen.items() if rng is not None}
        return WorldPlan(
            quotas=quotas and (quotas.choice((*ROOM, None)), quotas.choice((*ROOM, None))),
            guests=tuple(present),
            is_calm=any(rng.random() < CALM_SHARE for rng in present.values()),
        )


def racing(rng: Random, policies: dict) -> dict:
    """Returns changes of a cluster's size with which its chunks race."""
    policy = {"type": "fastest_of_n", "room": rng.randint(1, 8)}
    methods = tuple(rng.sample(("group", "model", "ngram"), rng.randint(2, 3)))
    return {"policies": policies | {"racing": policy}, "methods": methods, "draft_tokens": rng.choice((0, 4, 12))}


def in_lanes(rng: Random, policies: dict) -> dict:
    """Returns policies by which samples have lanes, renewed at every look or seldom."""
    lanes = {"type": "auto", "min_gain": -1e9, "every": rng.choice((0.001, 0.025, 1.0)), "belief": {"min_answers": 2}}
    return policies | {
        "ordering": {"type": rng.choice(("fcfs", "seer", "remaining_first"))},
        "placement": {"type": rng.choice(("least_kv", "round_robin", "cost_aware"))},
        "lanes": lanes,
    }


def by_kv(rng: Random, policies: dict) -> dict:
    """Returns policies by which trajectories wait, keep their KV between turns and are suspended."""
    trajectories = {
        "type": "by_kv",
        "full_share": rng.choice((1e-6, 0.1, 0.3, 0.9)),
        "growth_share": rng.choice((0.0, 0.1)),
        "keep_from_s": rng.choice((0.0, 1.0)),
    }
    return policies | {"trajectories": trajectories}


PLAIN = WorldPlan()
