"""One round on an engine: odd requests among healthy mates, and the problems that they cause. Runs in the host."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from queue import Empty, Queue
from typing import Any

import numpy as np

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.deployments.messages.errors import EngineDown, RequestRefused
from tailrace.lab.fuzz.engine.entry import MOST_TOKENS, OddSample, RequestEntry
from tailrace.lab.fuzz.engine.fair_clock import Since
from tailrace.lab.fuzz.engine.mates import MATES, difference, logprob_noise, mate
from tailrace.lab.fuzz.engine.problems import LATE, LOST, MATE, RAISED, RETRIED, RULE, WORDS
from tailrace.lab.fuzz.engine.refused_text import fault, printable
from tailrace.lab.fuzz.engine.rules import broken

LIMIT_S = 10.0
"""Maximum seconds from a request's arrival to its answer or refusal."""

IDLE_LOOKS = 12
"""Number of snapshots of an engine without work, a quarter of a second apart, after which an answer will not come any
more."""

WAIT_S, LATE_WAIT_S = 0.25, 0.005
"""Seconds between two looks at an engine; the second value holds while some requests wait for the mates' first
tokens."""

MATE_TOKENS_FIRST = 3
"""Number of tokens of a mate before late requests arrive, so that they join a step that decodes."""

Problem = tuple[str, str, int | None]
"""A problem: its kind, its words, and the place of the request that shows it, or None if that is not known."""

STATES_OF_REPLICA = "wants weights", "already running", "asleep"
"""Words of refusals that another replica may not give."""


@dataclass(slots=True)
class Fate:
    """The end of one request. `seconds`: fair seconds of its slowest piece, its checks included."""

    state: str = "pending"
    reason: str = ""
    seconds: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Round:
    """One round. `number`: names its groups of drafts. `say`: sends the parent an event."""

    engine: EngineRunner
    entry: RequestEntry
    reference: list[ChunkResult]
    keys: list[int]
    number: int
    context_tokens: int
    say: Callable[[str, int], None]
    fates: list[Fate] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    noise: float = 0.0
    _box: Queue = field(default_factory=Queue)
    _since: dict[int, Since] = field(default_factory=dict)  # of requests that wait, by place; mates are below 0
    _samples: dict[int, OddSample] = field(default_factory=dict)
    _mates: dict[int, Any] = field(default_factory=dict)
    _seen: tuple[float, int] | None = None
    _idle_looks: int = 0

    def run(self, requests: list[dict]) -> dict:
        """Runs all requests. Returns a report of plain values."""
        self.fates = [Fate() for _ in requests]
        for place, request in enumerate(requests):
            self._enter(place, request)
        late = [place for place in self._samples if requests[place].get("late")]
        for number in range(MATES):
            self._submit(-1 - number, mate(number, self.keys[number], self._group))
        for place in self._samples.keys() - set(late):
            self._submit(place, self._samples[place].next_chunk())
        self._await(late)
        self._check()
        return {
            "fates": [asdict(fate) | {"reason": printable(fate.reason)} for fate in self.fates],
            "problems": self.problems,
            "noise": self.noise,
            "mates": len(self._mates),
            "steps": self.engine.stats().steps,
        }

    @property
    def _group(self) -> str:
        return f"fuzz/{self.number}"

    def _enter(self, place: int, request: dict) -> None:
        self.say("entry", place)
        since, fate = Since(), self.fates[place]
        try:
            entered = self.entry.enter(request, f"odd-{place}", self._group)
        except Exception as error:  # noqa: BLE001 - whatever the entry raises is a finding
            fate.state, fate.reason = "raised", f"{type(error).__name__}: {error}"
            self._problem(RAISED, fate.reason, place)
        else:
            if isinstance(entered, str):
                self._refused(place, "refused at entry", entered)
            elif request.get("entry_alone"):
                fate.state = "taken at entry"
            else:
                self._samples[place] = entered
        self._took(place, since)

    def _submit(self, place: int, chunk) -> None:
        self._since[place] = Since()
        self.engine.submit(chunk, lambda answer: self._box.put((place, answer)))

    def _await(self, late: list[int]) -> None:
        """Waits for all answers, and submits the late requests once the mates decode."""
        while self._since or late:
            try:
                self._answered(*self._box.get(timeout=WAIT_S if not late else LATE_WAIT_S))
                self._idle_looks = 0
            except Empty:
                self.say("waits", self.engine.stats().steps)
            if late and (self._mates or self.engine.stats().running.get("mate-0", 0) >= MATE_TOKENS_FIRST):
                for place in late:
                    self._submit(place, self._samples[place].next_chunk())
                late, self._idle_looks = [], 0
            self._leave_long_ones()
            if (why := self._overdue()) is not None:
                self._problem(LATE, why, next(iter(self._since)) if len(self._since) == 1 else None)
                return

    def _overdue(self) -> str | None:
        """Returns in one line which requests have no answer in time, or will never have one, or None."""
        self._look()
        overdue = [place for place, since in self._since.items() if since.fair_s > LIMIT_S]
        is_lost = self._idle_looks >= IDLE_LOOKS and self._box.empty()
        if not overdue and not is_lost:
            return None
        names = sorted(overdue or self._since)
        for place in names:
            if place >= 0:
                self.fates[place].state, self.fates[place].seconds = "unanswered", self._since[place].fair_s
        why = f"after {LIMIT_S:.0f} s" if overdue else "and the engine has no work"
        return f"requests {names} (mates below 0) have no answer {why}; {self.engine.problem}"

    def _look(self) -> None:
        """Counts consecutive snapshots of an engine without work."""
        stats = self.engine.stats()
        look = stats.observed_at, stats.steps
        if stats.running or (self._seen is not None and stats.steps != self._seen[1]):
            self._idle_looks = 0
        elif look != self._seen:
            self._idle_looks += 1
        self._seen = look

    def _leave_long_ones(self) -> None:
        """Aborts answers that are longer than a driver here waits for."""
        running = self.engine.stats().running
        for sample in self._samples.values():
            if not sample.given_up and running.get(f"{sample.chunk.chunk_id}", 0) >= MOST_TOKENS:
                sample.given_up = True
                self.engine.abort(sample.chunk.chunk_id)

    def _answered(self, place: int, answer: ChunkResult | Exception) -> None:
        since = self._since.pop(place)
        if place < 0:
            self._mates[-1 - place] = answer
            return
        self.say("answer", place)
        fate, sample = self.fates[place], self._samples[place]
        self._took(place, since)
        if isinstance(answer, EngineDown):
            fate.state, fate.reason = "lost", str(answer)
        elif isinstance(answer, Exception):
            self._failed(place, answer)
        else:
            sample.take(answer)
            if (chunk := sample.next_chunk()) is not None:
                self._submit(place, chunk)
            else:
                fate.state, fate.tokens = "answered", len(sample.tokens)

    def _failed(self, place: int, error: Exception) -> None:
        text, fate = str(error), self.fates[place]
        own = isinstance(error, RequestRefused)
        of_replica = isinstance(error, ValueError) and any(words in text for words in STATES_OF_REPLICA)
        if own or of_replica:
            self._refused(place, "refused by the engine", text)
        else:
            fate.state, fate.reason = "failed", f"{type(error).__name__}: {text}"[:300]
            self._problem(RETRIED, fate.reason, place)

    def _refused(self, place: int, state: str, text: str) -> None:
        self.fates[place].state, self.fates[place].reason = state, text[:300]
        if (why := fault(text)) is not None:
            self._problem(WORDS, why, place)

    def _took(self, place: int, since: Since) -> None:
        fate = self.fates[place]
        fate.seconds = max(fate.seconds, since.fair_s)
        if since.fair_s > LIMIT_S:
            self._problem(LATE, f"{fate.state} after {since.fair_s:.1f} s: {fate.reason[:200]}", place)

    def _check(self) -> None:
        """Checks the engine, the mates and the odd answers."""
        if not self.engine.healthy:
            self._problem(LOST, str(self.engine.problem))
            return
        for number, answer in sorted(self._mates.items()):
            expected = self.reference[number]
            if (unlike := difference(expected, answer)) is not None:
                self._problem(MATE, f"mate {number}: {unlike}")
            elif isinstance(answer, ChunkResult):
                self.noise = max(self.noise, logprob_noise(expected, answer))
        for place, sample in self._samples.items():
            if self.fates[place].state == "answered":
                self._judge(place, sample)

    def _judge(self, place: int, sample: OddSample) -> None:
        prompts = self.entry.prompts
        try:
            rule = broken(sample, prompts.decode, prompts.encode, self.context_tokens)
        except (TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
            rule = f"its request is absurd, and it was answered with {np.shape(sample.tokens)} tokens ({error!r})"
        if rule is not None:
            self._problem(RULE, rule, place)

    def _problem(self, kind: str, text: str, place: int | None = None) -> None:
        self.problems.append((kind, printable(text[:1_000]), place))
