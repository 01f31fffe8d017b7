"""Recorded sessions of agents, scaled down and played over HTTP as completions of token ids, with turns and gaps.

A turn begins once the turn that it follows has ended and its gap has passed. Its prompt is the context that it extends
or branches from, with the server's answers, and then new random tokens. Answers have the recorded number of tokens.
The same sessions and salt give the same prompts while the answers are the same. Called by `bench agents --live`.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random

import aiohttp
import numpy as np

from tailrace.app.errors import Failed
from tailrace.lab.simulator.agents.trace import AgentSession, AgentTurn

TOKENS = range(100, 40_000)
"""Ids of new tokens: they are in a small model's vocabulary, and none is a special token."""

SAMPLED = {"temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True}
USAGE = {"stream_options": {"include_usage": True}}

Place = tuple[str, dict[str, str]]
"""URL of a session's completions, and the headers of its requests."""

Opener = Callable[[int], AbstractAsyncContextManager[Place]]
"""Function that opens the session with a number."""


def scaled(session: AgentSession, turns: int, factor: float, gap_factor: float) -> AgentSession:
    """Returns the first `turns` turns, tokens divided by `factor` and gaps by `gap_factor`.

    A context keeps at least two tokens, an answer at least one.
    """

    def one(turn: AgentTurn) -> AgentTurn:
        context, out = max(2, round(turn.context / factor)), max(1, round(turn.out / factor))
        known = min(round(turn.known / factor), context - 1)
        return turn._replace(context=context, known=known, out=out, gap_s=turn.gap_s / gap_factor)

    return AgentSession(session.session_id, tuple(map(one, session.turns[:turns])))


@dataclass(frozen=True)
class PlayedTurn:
    """A turn that was played. `first_s`: seconds until the first token. `prompt`: number of tokens of the prompt.
    `known`: number of those that an earlier turn had. `cached`: number of those whose KV the server found, or None if
    the server does not report it.
    """

    first_s: float
    prompt: int
    known: int
    cached: int | None
    token_ids: tuple[int, ...]


class PlayedSession:
    """One session to play. `salt`: part of the seed of new tokens, so that each run has different prompts."""

    def __init__(self, session: AgentSession, salt: str, http: aiohttp.ClientSession, model: str):
        self._session, self._salt, self._http, self._model = session, salt, http, model
        self._ended = [asyncio.Event() for _ in session.turns]
        self._contexts: dict[int, list[int]] = {}  # by turn: prompt and answer

    async def run(self, place: Place) -> list[PlayedTurn]:
        """Plays and returns all turns. Raises a group of aiohttp.ClientError if a turn gets no full answer."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._turn(number, place)) for number in range(len(self._session.turns))]
        return [task.result() for task in tasks]

    async def _turn(self, number: int, place: Place) -> PlayedTurn:
        turn, before = self._session.turns[number], self._before(number)
        for other in {turn.after, before} - {None}:
            await self._ended[other].wait()
        await asyncio.sleep(turn.gap_s)
        known = [] if before is None else self._contexts[before]
        if turn.source != turn.line:
            known = known[: turn.known]
        draw = Random(f"{self._salt}/{self._session.session_id}/{number}")
        new = max(1, turn.context - len(known))
        prompt = [*known, *(draw.choice(TOKENS) for _ in range(new))]
        played = await self._asked(prompt, len(known), turn.out, place)
        self._contexts[number] = [*prompt, *played.token_ids]
        self._ended[number].set()
        return played

    def _before(self, number: int) -> int | None:
        """Returns the turn whose context a turn extends, or the first one whose context holds all that a branch shares.

        Returns None if there is no such turn.
        """
        turn, turns = self._session.turns[number], self._session.turns
        if turn.source == turn.line:
            return turn.after
        line = (one for one in range(number) if turns[one].line == turn.source)
        return next((one for one in line if turns[one].context >= turn.known), None)

    async def _asked(self, prompt: list[int], known: int, out: int, place: Place) -> PlayedTurn:
        url, headers = place
        body = {"model": self._model, "prompt": prompt, "max_tokens": out} | SAMPLED | USAGE
        began_s, first_s, token_ids, usage = time.monotonic(), None, [], {}
        async with self._http.post(url, json=body, headers=headers, raise_for_status=True) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise aiohttp.ClientPayloadError(event["error"]["message"])
                usage = event.get("usage") or usage
                token_ids += [token for one in event["choices"] for token in one.get("token_ids") or ()]
                first_s = first_s or (time.monotonic() - began_s if token_ids else None)
        if len(token_ids) != out:
            raise aiohttp.ClientPayloadError(f"{len(token_ids)} tokens came, of {out}")
        details = usage.get("prompt_tokens_details")
        cached = None if details is None else details.get("cached_tokens", 0)
        return PlayedTurn(first_s, len(prompt), known, cached, tuple(token_ids))


async def play(
    sessions: Sequence[AgentSession], salt: str, model: str, opener: Opener
) -> tuple[float, list[list[PlayedTurn]]]:
    """Plays all sessions at once. Returns the seconds until the last one has ended, and the turns of each session.

    Raises Failed if a turn gets no full answer.
    """
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a server may close an idle one as a request arrives
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def one(number: int) -> list[PlayedTurn]:
            try:
                async with opener(number) as place:
                    return await PlayedSession(sessions[number], salt, http, model).run(place)
            except* aiohttp.ClientError as errors:
                raise Failed(f"{sessions[number].session_id}: {errors.exceptions[0]}") from errors

        began_s = time.monotonic()
        found = await asyncio.gather(*map(one, range(len(sessions))))
        return time.monotonic() - began_s, found


def figures(seconds: float, played: Sequence[Sequence[PlayedTurn]], computed: int | None = None) -> dict:
    """Returns the figures of one run. `computed`: number of prompt tokens whose KV was computed; by default those that
    the turns report as not cached.
    """
    turns = [turn for of in played for turn in of]
    known, prompts = sum(turn.known for turn in turns), sum(turn.prompt for turn in turns)
    if computed is None:
        computed = sum(turn.prompt - (turn.cached or 0) for turn in turns)
    waits = np.percentile([turn.first_s for turn in turns], (50, 99))
    return {
        "trajectories_per_h": round(len(played) / seconds * 3600, 1),
        "makespan_s": round(seconds, 1),
        "recomputed_share": round(max(0, computed - (prompts - known)) / max(1, known), 4),
        "ttft_p50_s": round(float(waits[0]), 2),
        "ttft_p99_s": round(float(waits[1]), 2),
        "turns": len(turns),
        "prompt_tokens": prompts,
        "known_tokens": known,
        "answer_tokens": sum(len(turn.token_ids) for turn in turns),
    }
