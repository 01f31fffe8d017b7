"""Draft budgets on a modelled clock: one replica's own drafting code over recorded rollouts, without an engine.

`EngineDrafts` is the engine's own class, so index, policies and counts are those of a replica. Only the seconds of a
step are modelled: they are what `tailrace profile` measured for as many tokens. Ratios of budgets are therefore exactly
repeatable, unlike those of a live run, which shares its cores. Called by `bench budgets`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from tailrace.app.errors import BadInput
from tailrace.app.step_profile import CONTEXTS
from tailrace.app.strict_json import parse_object
from tailrace.deployments.draft_index.proposal import accepted_tokens
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.drafting.drafts import EngineDrafts
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import Fetched, GroupRef, PastAnswer
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.lab.benchmarks.drafting.drafts import RecordedRollouts
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.families.registry import load_policy
from tailrace.policies.models.step_cost_estimator import rising
from tailrace.policies.protocol.step_cost import StepCost

CPU = StepCost((4, 8, 16, 32, 64, 128), (0.041, 0.050, 0.072, 0.112, 0.203, 0.395))
"""Step costs by `tailrace profile` of the demo model in float32 on one core with AVX-512; --profile replaces them."""

REHEARSED = (1, 4, 8, 16, 32, 64, 128, 512)
TAIL_RUNNING = 2
MODEL_LEN = 1 << 20

BUDGETS: dict[str, object] = {
    "off": "off",
    **{f"fixed_{tokens}": {"type": "fixed", "tokens": tokens} for tokens in (1, 2, 4, 8)},
    "unlimited": {"type": "fixed", "tokens": 16},
    **{name: name for name in ("aimd", "closed_form", "concurrency", "goodput")},
}
"""Drafting policies by the name of the run. `length_class` is left out: it needs the core, which does not run here."""
VARIANTS = {
    "goodput_without_group": IndexSettings(group_context=False),
    "goodput_without_history": IndexSettings(history=False),
    "goodput_without_learning": IndexSettings(learning=False),
}


class BudgetOutcome(NamedTuple):
    """Figures of one run; its seconds are modelled, except for `draft_us`."""

    makespan_s: float
    tail_tokens_per_s: float | None
    acceptance_length: float
    drafted: int
    accepted: int
    draft_us: float  # measured, per sample: median over the steps in which `most_running` samples run


@dataclass
class _Request:
    """The fields of vLLM's request that `EngineDrafts` reads and writes."""

    num_tokens: int
    spec_token_ids: list[int] = field(default_factory=list)


def cost_of(path: Path) -> StepCost:
    """Returns the cost of steps by their tokens, from a profile's points with the shortest context.

    Raises BadInput, with a message of one line, if the file is not a profile.
    """
    try:
        steps = [step for step in parse_object(path.read_bytes())["steps"] if step["context_tokens"] == CONTEXTS[0]]
        by_tokens: dict[int, list[float]] = {}
        for step in steps:
            by_tokens.setdefault(step["chunks"] * (1 + step["draft_tokens"]), []).append(step["step_ms"] / 1e3)
        tokens = sorted(by_tokens)
        seconds = rising(np.array([median(by_tokens[count]) for count in tokens]), np.ones(len(tokens)))
        return StepCost(tuple(tokens), tuple(seconds.tolist()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--profile {path}: not what `tailrace profile --out` writes: {error}") from error


class EarlierDrafts:
    """A replacement for an engine's feed, which supplies each group's history."""

    def __init__(self, answers: dict[GroupRef, list[PastAnswer]]):
        self._answers, self._ready = answers, []

    def hold(self, group: GroupRef) -> None:
        if group in self._answers:
            self._ready.append(Fetched(group, [], self._answers.pop(group)))

    def take(self) -> list:
        ready, self._ready = self._ready, []
        return ready

    def append(self, *_piece) -> None:
        """Does nothing: no other replica needs the tokens."""

    def rest(self, _group: GroupRef) -> None:
        """Does nothing: this feed keeps nothing for a group."""

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Does nothing: this feed holds nothing open."""


class Replica:
    """One replica that runs whole samples in the given order, at most `most_running` at once."""

    def __init__(
        self, settings: IndexSettings, policy: Drafting, cost: StepCost, most_running: int, history: EarlierDrafts
    ):
        self._drafts = EngineDrafts(DraftConfig(index=settings), MODEL_LEN, history)
        self._policy, self._cost, self._most_running = policy, cost, most_running
        self._running: dict[str, tuple[_Request, ChunkRequest]] = {}
        for tokens in REHEARSED:
            self._drafts.performance.steps.record(tokens, float(cost.at(tokens)))

    def run(self, chunks: list[ChunkRequest]) -> BudgetOutcome:
        """Runs all chunks to their end."""
        waiting, clock_s, steps, tail_s = chunks[::-1], 0.0, 0, 0.0
        made = tail_made = drafted = accepted = 0
        full_us = []
        while waiting or self._running:
            while waiting and len(self._running) < self._most_running:
                self._start(waiting.pop())
            tokens = sum(1 + len(request.spec_token_ids) for request, _ in self._running.values())
            took_s, in_tail = float(self._cost.at(tokens)), not waiting and len(self._running) <= TAIL_RUNNING
            running, before_us = len(self._running), self._drafts.counts()["draft_us"]
            steps += running
            drafted += tokens - running
            new, right = self._step()
            self._drafts.performance.steps.record(tokens, took_s, running)
            self._drafts.propose()
            if running == self._most_running:
                full_us.append((self._drafts.counts()["draft_us"] - before_us) / running)
            clock_s, made, accepted = clock_s + took_s, made + new, accepted + right
            tail_s, tail_made = tail_s + in_tail * took_s, tail_made + in_tail * new
        draft_us = round(median(full_us), 1) if full_us else 0.0
        self._drafts.stop()
        tail = round(tail_made / tail_s, 2) if tail_s else None
        return BudgetOutcome(
            makespan_s=round(clock_s, 3),
            tail_tokens_per_s=tail,
            acceptance_length=round(made / steps, 3),
            drafted=drafted,
            accepted=accepted,
            draft_us=draft_us,
        )

    def _start(self, chunk: ChunkRequest) -> None:
        request = _Request(len(chunk.token_ids))
        self._running[chunk.chunk_id] = request, chunk
        self._drafts.open(chunk, request)
        self._drafts.settle()

    def _step(self) -> tuple[int, int]:
        """Runs a step. Returns the number of new tokens, and how many of them had been drafted."""
        new = right = 0
        for chunk_id, (request, chunk) in list(self._running.items()):
            rest = chunk.forced[request.num_tokens - chunk.prompt_tokens :]
            draft, request.spec_token_ids = request.spec_token_ids, []
            hit = accepted_tokens(draft, rest.tolist())
            tokens = rest[: hit + 1].tolist()
            request.num_tokens += len(tokens)
            new, right = new + len(tokens), right + min(hit, len(tokens))
            self._drafts.made_by([(chunk_id, tokens)])
            if len(rest) == len(tokens):
                self._drafts.close(chunk_id)
                del self._running[chunk_id]
        return new, right


def measure(rollouts: list[RecordedRollouts], cost: StepCost, most_running: int, say: Callable[[str], None]) -> dict:
    """Returns the outcome of each budget over the same samples.

    `ratio`: the makespan without drafts divided by the budget's. Above 1 the budget is faster than no drafts.
    """
    runs: dict[str, BudgetOutcome] = {}
    wanted = [(name, spec, IndexSettings()) for name, spec in BUDGETS.items()]
    wanted += [(name, "goodput", settings) for name, settings in VARIANTS.items()]
    for name, spec, settings in wanted:
        chunks, history = workload(rollouts, load_policy("drafting", spec))
        policy = chunks[0].draft.policy
        runs[name] = outcome = Replica(settings, policy, cost, most_running, EarlierDrafts(history)).run(chunks)
        say(f"{name}: {outcome.makespan_s} s, {outcome.acceptance_length} tokens a verification")
    off, ours = runs["off"], runs["goodput"]
    best = min((run for name, run in runs.items() if name.startswith("fixed_")), key=lambda run: run.makespan_s)
    tails = ours.tail_tokens_per_s, off.tail_tokens_per_s
    return {
        "runs": {name: run._asdict() for name, run in runs.items()},
        "ratio": {name: round(off.makespan_s / run.makespan_s, 3) for name, run in runs.items()},
        "goodput_to_best_fixed": round(best.makespan_s / ours.makespan_s, 3),
        "tail_speedup": round(tails[0] / tails[1], 3) if all(tails) else None,
        "samples": sum(len(prompt.mates) for prompt in rollouts),
        "most_running": most_running,
    }


def workload(
    rollouts: list[RecordedRollouts], policy: Drafting
) -> tuple[list[ChunkRequest], dict[GroupRef, list[PastAnswer]]]:
    """Returns every mate of every prompt as one chunk, group by group, and each group's history."""
    chunks, history = [], {}
    longest = max(len(answer) for prompt in rollouts for answer in prompt.mates)
    for number, prompt in enumerate(rollouts):
        group = GroupRef(f"bench/{number}", str(number))
        history[group] = list(prompt.history)
        for index, answer in enumerate(prompt.mates):
            plan = DraftPlan(
                group=group, sample_index=index, epoch=1, expected_tokens=longest, class_starts=(0, 0), policy=policy
            )
            name, size = f"{number}#{index}", len(prompt.prompt)
            forced = np.asarray(answer, np.int32)
            what = (name, 0, prompt.prompt, size, longest, SamplingParams(), 0)
            chunks.append(ChunkRequest(*what, draft=plan, forced=forced))
    return chunks, history
