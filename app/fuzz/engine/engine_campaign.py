"""Rounds of odd requests for some minutes, and the problems that they show: each once, made small."""

import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tailrace.app.fuzz.engine.grammar import HAND, drawn
from tailrace.app.fuzz.engine.hosted import HostedEngine
from tailrace.app.fuzz.engine.problems import GROWTH, LATE, LOST, MATE
from tailrace.app.fuzz.engine.shorten import shortened

REQUESTS_PER_ROUND = 12
"""A part is refused at the door; six or so share the engine's steps with the mates."""

DOORS_PER_ROUND = 60
"""More requests that go no further than the door, which takes less than a millisecond of each."""

MOST_TRIES = 40
"""To make one problem small; a try that ends an engine takes its start, some 8 s."""

MAX_SHORTENED = 12
"""Problems that are made small in one run."""

GROWTH_MB = 1_500
"""Of the engine's process, over its size after WARM_ROUNDS rounds: two caches of forms take 0.5 GB each."""

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
        """The command that repeats it."""
        given = " ".join(f"--request {shlex.quote(json.dumps(one))}" for one in self.requests)
        return f"tailrace fuzz --engine {given}"


@dataclass(slots=True)
class EngineReport:
    """Sums over all rounds. `slowest_s`: of a refusal, and of an answer, with the reason or request."""

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
    rss_mb: list[float] = field(default_factory=list)
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

    def values(self) -> dict:
        """Returns it as plain values."""
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
            "rss_mb": round(self.rss_mb[-1], 1) if self.rss_mb else 0.0,
            "findings": [
                {"kind": one.kind, "problem": one.text, "count": one.count, "round": one.round, "command": one.command}
                for one in self.findings.values()
            ],
        }


def requests_of(seed: int, number: int, count: int = REQUESTS_PER_ROUND, doors: int = DOORS_PER_ROUND) -> list[dict]:
    """Returns the requests of one round of a seed. `doors`: drawn for the door alone; those by hand drop out."""
    rng = Random(f"{seed}/{number}")
    run = [drawn(rng) for _ in range(count)]
    return run + [one | {"door_alone": True} for one in (drawn(rng) for _ in range(doors)) if one["way"] != HAND]


def signature(kind: str, text: str) -> tuple[str, str]:
    """Returns the kind of a problem, and its words without numbers and quoted parts: the same for the same problem."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[-+]?\d[\d.e+-]*|0x\w+", "#", text)
    return kind, re.sub(r"\s+", " ", words)[:80]


def engine_campaign(
    engine: HostedEngine, seed: int, seconds: float, heard: Callable[[str], None], progress: Callable[[str], None]
) -> EngineReport:
    """Runs rounds until the time is up, one at least. `heard`: gets each new problem; `progress`: a line a round."""
    report, began_s, base_mb = EngineReport(seed), time.monotonic(), None
    while report.rounds == 0 or time.monotonic() - began_s < seconds:
        requests = requests_of(seed, report.rounds)
        result, starts = engine.run(requests), engine.starts
        report.take(result)
        for kind, text, place in result["problems"]:
            suspects = requests if place is None else [requests[place], *requests[:place], *requests[place + 1 :]]
            _find(report, engine, kind, text, suspects, heard, began_s + seconds)
        report.starts = engine.starts
        fates = ", ".join(f"{count} {state}" for state, count in report.fates.most_common())
        passed_s = time.monotonic() - began_s
        progress(f"{passed_s:.0f} s, {report.rounds} rounds, {len(report.findings)} problems: {fates}")
        if result["rss_mb"]:
            report.rss_mb.append(result["rss_mb"])
        if starts != engine.starts or result["rss_mb"] == 0 or base_mb is None or engine.rounds_of_this <= WARM_ROUNDS:
            base_mb = result["rss_mb"] or None
        elif result["rss_mb"] - base_mb > report.grown_mb:
            report.grown_mb = result["rss_mb"] - base_mb
            if report.grown_mb > GROWTH_MB and (GROWTH, "") not in report.findings:
                text = f"{base_mb:.0f} MB after {WARM_ROUNDS} rounds, {result['rss_mb']:.0f} MB now"
                report.findings[GROWTH, ""] = Finding(GROWTH, text, report.rounds, requests)
    return report


def _find(
    report: EngineReport,
    engine: HostedEngine,
    kind: str,
    text: str,
    requests: list[dict],
    heard: Callable[[str], None],
    until_s: float,
) -> None:
    """Notes a problem; a new one is made small, as long as there is time. The first request is the likeliest."""
    name = signature(kind, text)
    if (known := report.findings.get(name)) is not None:
        known.count += 1
        return
    small = requests
    if len(report.findings) < MAX_SHORTENED and time.monotonic() < until_s:
        small = requests[:1] if _shows(engine, requests[:1], name, until_s) else requests
        small = shortened(small, lambda some: _shows(engine, some, name, until_s), MOST_TRIES)
    one = report.findings[name] = Finding(kind, text, report.rounds - 1, small)
    heard(f"{kind}: {text}\n  {one.command}")


def _shows(engine: HostedEngine, requests: list[dict], name: tuple[str, str], until_s: float) -> bool:
    """Returns whether these requests show the problem again; False once the time is up."""
    if time.monotonic() > until_s + 60:
        return False
    return any(signature(kind, text) == name for kind, text, _ in engine.run(requests)["problems"])
