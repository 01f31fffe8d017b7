"""Turns and tools on real replicas: samples that are held between their turns, against each turn as a new request.

The modes take turns on one service, each with empty caches and no history, and must make the same tokens. A tool is a
wait, and its answer is a text of random digits that no draft index can hold.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import median

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.session import RolloutSession
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed
from tailrace.deployments.messages.session import SampleAnswer

HOLD_S = 120.0
MODES = ("held", "requests")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class TurnsWorkload:
    """The workload. `tool_s`: mean seconds of a tool, exponential. `tool_tokens`: tokens of a tool's answer."""

    prompts: int
    samples: int
    turns: int
    prompt_tokens: int
    turn_tokens: int
    tool_s: float
    tool_tokens: int
    encode: Encode

    def prompt(self, number: int) -> tuple[int, ...]:
        return self._digits(f"prompt {number}", "You may call a tool. Notes: ", self.prompt_tokens)

    def tool(self, number: int, index: int, turn: int) -> tuple[float, tuple[int, ...]]:
        """Returns the seconds of a tool call, and the tokens of its answer."""
        name = f"tool {number}/{index}/{turn}"
        return Random(name).expovariate(1 / self.tool_s), self._digits(name, "\nResult: ", self.tool_tokens)

    def _digits(self, name: str, head: str, tokens: int) -> tuple[int, ...]:
        chance = Random(name)
        text = head + " ".join(str(chance.randrange(10_000)) for _ in range(tokens))
        return tuple(self.encode(text)[:tokens])


@dataclass(frozen=True)
class Trajectory:
    answers: list[SampleAnswer]
    seconds: float

    def tokens(self) -> list[tuple[int, ...]]:
        return [answer.sample.token_ids for answer in self.answers]

    def known(self) -> tuple[int, int]:
        """Returns the number of context tokens of later turns that earlier turns had computed, and how many of these
        were computed again. A chunk does not compute its last token: the next chunk does.
        """
        known = again = 0
        for before, after in pairwise(self.answers):
            computed = len(before.prompt_token_ids) + len(before.sample.token_ids) - 1
            known += computed
            new = len(after.prompt_token_ids) - computed
            again += after.sample.computed_tokens - new - (after.sample.chunks - 1)
        return known, again


async def trajectory(session: RolloutSession, work: TurnsWorkload, number: int, index: int, held: bool) -> Trajectory:
    began_s, context, answers = time.monotonic(), work.prompt(number), []
    for turn in range(work.turns):
        last = turn + 1 == work.turns
        answer = await session.generate(
            context,
            group=f"task-{number}",
            index=index,
            of=work.samples if not turn else None,
            turn=turn,
            max_tokens=work.turn_tokens,
            hold_s=HOLD_S if held and not last else 0.0,
        )
        answers.append(answer)
        if not last:
            tool_s, tokens = work.tool(number, index, turn)
            await asyncio.sleep(tool_s)
            context = (*answer.prompt_token_ids, *answer.sample.token_ids, *tokens)
    return Trajectory(answers, time.monotonic() - began_s)


async def play(client: RolloutClient, work: TurnsWorkload, held: bool) -> tuple[dict, list[Trajectory]]:
    """Rolls out all trajectories at once. Returns the figures, and the trajectories.

    Deletes history first: the runs make the same tokens, and would draft from each other.
    """
    await client.reset_caches()
    await client.forget_history()
    began_s = time.monotonic()
    async with client.open(seed=5) as session:
        places = [(number, index) for number in range(work.prompts) for index in range(work.samples)]
        found = await asyncio.gather(*(trajectory(session, work, *place, held) for place in places))
    makespan_s = time.monotonic() - began_s
    known, again = (sum(part) for part in zip(*(one.known() for one in found), strict=True))
    samples = [answer.sample for one in found for answer in one.answers]
    return {
        "makespan_s": round(makespan_s, 2),
        "mean_trajectory_s": round(sum(one.seconds for one in found) / len(found), 2),
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "known_tokens": known,
        "recomputed_tokens": again,
        "recomputed_share": round(again / known, 4),
        "chunks": sum(sample.chunks for sample in samples),
        "tokens_a_verification": round(
            sum(len(sample.token_ids) for sample in samples) / sum(sample.verifications for sample in samples), 3
        ),
    }, found


async def play_all(client: RolloutClient, work: TurnsWorkload, repeats: int, say: Callable[[str], None]) -> dict:
    runs: dict[str, list[dict]] = {mode: [] for mode in MODES}
    say("one prompt of each mode first, not counted: engines measure their steps")
    for mode in MODES:
        await play(client, replace(work, prompts=1), mode == "held")
    expected = None
    for repeat in range(repeats):
        for mode in MODES if repeat % 2 == 0 else MODES[::-1]:
            figures, found = await play(client, work, mode == "held")
            say(f"{mode}: makespan {figures['makespan_s']} s, recomputed {100 * figures['recomputed_share']:.1f} %")
            runs[mode].append(figures)
            tokens = [one.tokens() for one in found]
            if tokens != (expected := expected or tokens):
                raise Failed(f"turns: {mode} made other tokens than the first run")
    return runs


def measure(file: ServeFile, work: TurnsWorkload, repeats: int, say: Callable[[str], None]) -> dict:
    """Returns the figures of both modes. `makespan_ratio`: median makespan of requests over that of held samples.

    Raises Failed if two runs make other tokens.
    """
    say("starting the service")
    with service(file, None) as client:
        runs = asyncio.run(play_all(client, work, repeats, say))
    medians = {mode: {key: median(one[key] for one in of) for key in of[0]} for mode, of in runs.items()}
    held, requests = (medians[mode] for mode in MODES)
    return {
        "trajectories": work.prompts * work.samples,
        "turns": work.turns,
        "makespan_ratio": round(requests["makespan_s"] / held["makespan_s"], 3),
        "recomputed_share": {mode: of["recomputed_share"] for mode, of in medians.items()},
        "tokens_identical": True,
        "medians": medians,
        "runs": runs,
    }
