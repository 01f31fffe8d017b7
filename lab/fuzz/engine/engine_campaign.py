"""Rounds of odd requests for some minutes, and the problems that they show, each once and made small."""

import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tailrace.lab.fuzz.engine.grammar import HAND, drawn
from tailrace.lab.fuzz.engine.hosted import HostedEngine
from tailrace.lab.fuzz.engine.problems import GROWTH, LATE, LOST, MATE
from tailrace.lab.fuzz.engine.shorten import shortened

REQUESTS_PER_ROUND = 12
"""Number of requests of a round. Checks refuse some; about six share the engine's steps with the mates."""

ENTRIES_PER_ROUND = 60
"""Number of further requests that are only checked, which takes less than a millisecond each."""

MOST_TRIES = 40
"""Maximum number of tries to make one problem small. A try that ends an engine costs its start, some 8 s."""

SPARE_S = 60.0
"""Seconds beyond the time limit in which a problem that was found in time may still be made small."""

MAX_SHORTENED = 12
"""Maximum number of problems that are made small in one run."""

GROWTH_MB = 1_500
"""Maximum growth of the engine's process, in MB, over its size after WARM_ROUNDS rounds: two caches of forms take 0.5
GB each."""

WARM_ROUNDS = 20


@dataclass(slots=True)
class Finding:
    """A problem, how often it came, and the smallest requests that show it."""

    kind: str
    text: str
    round: int
    requests: list[dict]
    count: int = 1

    @property
    def command(self) -> str:
        """The command that repeats the problem."""
        given = " ".join(f"--request {shlex.quote(json.dumps(one))}" for one in self.requests)
        return f"tailrace fuzz --engine {given}"


@dataclass(slots=True)
class EngineReport:
    """Sums over all rounds. `slowest`: seconds of the slowest refusal and answer, with the reason."""

    seed: int
    rounds: int = 0
    fates: Counter = field(default_factory=Counter)
    problems: Counter = field(default_factory=Counter)
    slowest: dict[str, tuple[float, str]] = field(default_factory=dict)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    noise: float = 0.0
    tokens: int = 0
    mates: int = 0
    starts: int = 0
    rss_mb: float = 0.0
    base_mb: float = 0.0
    grown_mb: float = 0.0

    def take(self, report: dict) -> None:
        self.rounds += 1
        self.mates += report.get("mates", 0)
        self.noise = max(self.noise, report["noise"])
        self.problems.update(kind for kind, *_ in report["problems"])
        for fate in report["fates"]:
            self.fates[fate["state"]] += 1
            self.tokens += fate["tokens"]
            kind = "refusal" if fate["state"].startswith("refused") else fate["state"]
            if fate["seconds"] > self.slowest.get(kind, (0.0, ""))[0]:
                self.slowest[kind] = round(fate["seconds"], 2), fate["reason"][:120]

    def remember(self, rss_mb: float, rounds: int) -> str | None:
        """Records the memory of an engine after that many rounds. Returns a line if it grows without limit, or None."""
        if not rss_mb:
            return None
        self.rss_mb = rss_mb
        if rounds <= WARM_ROUNDS:
            self.base_mb = rss_mb
        self.grown_mb = max(self.grown_mb, rss_mb - self.base_mb)
        is_much = rss_mb - self.base_mb > GROWTH_MB
        return f"{self.base_mb:.0f} MB after {WARM_ROUNDS} rounds, {rss_mb:.0f} MB now" if is_much else None

    def note(self, kind: str, text: str) -> Finding | None:
        """Counts a problem. Returns its finding if it is new, still without requests."""
        known = self.findings.get(name := signature(kind, text))
        if known is not None:
            known.count += 1
            return None
        self.findings[name] = Finding(kind, text, self.rounds - 1, [])
        return self.findings[name]

    def values(self) -> dict:
        """Returns the report as plain values."""
        return {
            "seed": self.seed,
            "rounds": self.rounds,
            "requests": self.fates.total(),
            "fates": dict(self.fates.most_common()),
            "odd_tokens": self.tokens,
            "mates": self.mates,
            "mates_that_differ": self.problems[MATE],
            "engines_lost": self.problems[LOST],
            "hangs": self.problems[LATE],
            "problems": dict(self.problems.most_common()),
            "slowest_s": {kind: {"seconds": s, "reason": why} for kind, (s, why) in sorted(self.slowest.items())},
            "logprob_noise": self.noise,
            "engine_starts": self.starts,
            "grown_mb": round(self.grown_mb, 1),
            "rss_mb": round(self.rss_mb, 1),
            "findings": [
                {"kind": one.kind, "problem": one.text, "count": one.count, "round": one.round, "command": one.command}
                for one in self.findings.values()
            ],
        }


def requests_of(
    seed: int, number: int, count: int = REQUESTS_PER_ROUND, entries: int = ENTRIES_PER_ROUND
) -> list[dict]:
    """Returns the requests of one round of a seed. `entries`: number of requests drawn to be only checked; those made
    by hand drop out."""
    rng = Random(f"{seed}/{number}")
    run = [drawn(rng) for _ in range(count)]
    return run + [one | {"entry_alone": True} for one in (drawn(rng) for _ in range(entries)) if one["way"] != HAND]


def signature(kind: str, text: str) -> tuple[str, str]:
    """Returns the kind of a problem, and its words without numbers and quoted parts: equal for the same problem."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[-+]?\d[\d.e+-]*|0x\w+", "#", text)
    return kind, re.sub(r"\s+", " ", words)[:80]


def engine_campaign(
    engine: HostedEngine, seed: int, seconds: float, heard: Callable[[str], None], progress: Callable[[str], None]
) -> EngineReport:
    """Runs rounds until the time is up, but at least one. `heard`: gets each new problem. `progress`: gets a line a
    round."""
    report, began_s = EngineReport(seed), time.monotonic()
    while report.rounds == 0 or time.monotonic() - began_s < seconds:
        requests = requests_of(seed, report.rounds)
        result = engine.run(requests)
        report.take(result)
        problems = result["problems"]
        if (grown := report.remember(result["rss_mb"], engine.rounds_of_this)) is not None:
            problems = [*problems, (GROWTH, grown, None)]
        for kind, text, place in problems:
            suspects = requests if place is None else [requests[place]]
            one = report.note(kind, text)
            if one is not None:
                one.requests = _small(engine, one, suspects, requests, began_s + seconds, report)
                heard(f"{kind}: {text}\n  {one.command}")
        report.starts = engine.starts
        fates = ", ".join(f"{count} {state}" for state, count in report.fates.most_common())
        passed_s = time.monotonic() - began_s
        progress(f"{passed_s:.0f} s, {report.rounds} rounds, {len(report.findings)} problems: {fates}")
    return report


def _small(
    engine: HostedEngine,
    one: Finding,
    suspects: list[dict],
    requests: list[dict],
    until_s: float,
    report: EngineReport,
) -> list[dict]:
    """Returns the smallest requests that show a problem, as long as there is time; otherwise the suspects."""
    if one.kind == GROWTH or len(report.findings) > MAX_SHORTENED or time.monotonic() > until_s:
        return suspects
    name = signature(one.kind, one.text)

    def shows(some: list[dict]) -> bool:
        problems = engine.run(some)["problems"] if time.monotonic() < until_s + SPARE_S else ()
        return any(signature(kind, text) == name for kind, text, _ in problems)

    if len(suspects) < len(requests) and not shows(suspects):
        suspects = requests  # it takes others, too
    return shortened(suspects, shows, MOST_TRIES)
