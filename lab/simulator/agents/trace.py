"""Recorded sessions of agents as a workload: requests with their sizes, what each continues, and the gap before it.

Read from JSONL, plain or gzip, a session a line: `{id, requests: [{t, in, out, parent, shared, agent?, think_s?,
stop?}]}`.
`parent`: index of the earlier request with the longest common prefix, `shared`: its tokens. A request that extends the
context of its agent's last request continues its line; any other begins a line, a branch, which shares tokens with
another one. Errors are ValueError: file, line, key and how to mend it. Called by `bench agents`.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK_TOKENS = 64
"""Blocks by which the recorder compared prompts: a shared prefix may be this much longer than recorded."""

SLACK_TOKENS = 256
"""Tokens that a context may be shorter than the request before with its answer, and still extend it: the recorder
counted answers by their own tokens. The context is then one token longer than before."""


class AgentTurn(NamedTuple):
    """One request. `after`: index of the request that it waits for, with `gap_s` in between; None: it begins its
    session. `line`: contexts of one line extend each other. `context`: tokens of the prompt, of which `known` are in
    the prompt or the answer of an earlier turn of line `source` (its own, unless it begins a line); None: of none.
    `forks`: another line is the source, and goes on. `ends_line`: nothing later reads its line. `stop`: why the answer
    ended, as recorded: `tool_use`, or `end_turn`, after which a person may be next.
    """

    after: int | None
    gap_s: float
    line: int
    source: int | None
    context: int
    known: int
    out: int
    forks: bool = False
    ends_line: bool = False
    stop: str = ""


class AgentSession(NamedTuple):
    session_id: str
    turns: tuple[AgentTurn, ...]


def read_sessions(path: Path, gap_cap_s: float, max_context: int) -> list[AgentSession]:
    """Returns the sessions of a file. Gaps are at most `gap_cap_s`; a session ends before its first context beyond
    `max_context` tokens, answer included. Raises ValueError.
    """
    found = []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    found.append(_session(f"{path}, line {number}", text, gap_cap_s, max_context))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not any(session.turns for session in found):
        raise ValueError(f"{path}: no session with a request that fits; give a file with a session a line")
    return [session for session in found if session.turns]


def _session(place: str, text: str, gap_cap_s: float, max_context: int) -> AgentSession:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place}: no JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("requests"), list) or not row["requests"]:
        raise ValueError(f"{place}: requests: give a list with a request at least")
    requests = [_checked(f"{place}, requests.{index}", index, of) for index, of in enumerate(row["requests"])]
    return AgentSession(str(row.get("id", place)), _marked(list(_turns(requests, gap_cap_s, max_context))))


def _checked(place: str, index: int, request: object) -> dict:
    if not isinstance(request, dict):
        raise ValueError(f"{place}: give an object with in, out, parent and shared")
    for key, least in (("in", 1), ("out", 0), ("shared", 0)):
        if not _is_number(value := request.get(key), int) or value < least:
            raise ValueError(f"{place}.{key}: {value!r}; give a number of tokens, {least} at least")
    if request["shared"] > request["in"]:
        raise ValueError(f"{place}.shared: {request['shared']} of {request['in']} tokens; give `in` at most")
    for key in ("t", "think_s"):
        if not _is_number(value := request.get(key) or 0.0, (int, float)) or not 0 <= value < float("inf"):
            raise ValueError(f"{place}.{key}: {value!r}; give seconds, 0 at least")
    parent = request.get("parent")
    if parent is not None and (not _is_number(parent, int) or not 0 <= parent < index):
        raise ValueError(f"{place}.parent: {parent!r}; give the index of an earlier request, or null")
    return request


def _is_number(value: object, kinds) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _turns(requests: list[dict], gap_cap_s: float, max_context: int) -> Iterator[AgentTurn]:
    last: dict[object, int] = {}  # by agent: its last request
    turns: list[AgentTurn] = []
    for index, request in enumerate(requests):
        parent, agent = request.get("parent"), request.get("agent")
        before = last.get(agent)
        after = before if before is not None else parent if parent is not None else (0 if index else None)
        last[agent] = index
        gap_s = min(float(request.get("think_s") or 0.0), gap_cap_s)
        turn = _turn(request, after, gap_s, turns, extends=parent == before)
        if turn.context + turn.out > max_context:
            return
        turns.append(turn)
        yield turn


def _turn(request: dict, after: int | None, gap_s: float, turns: list[AgentTurn], extends: bool) -> AgentTurn:
    """`extends`: its parent is its agent's last request."""
    context, out, parent = request["in"], max(1, request["out"]), request.get("parent")
    turn = AgentTurn(
        after=after, gap_s=gap_s, line=len(turns), source=None, context=context, known=0, out=out,
        stop=str(request.get("stop", "")),
    )  # fmt: skip
    if parent is None:
        return turn
    before = turns[parent]
    whole = before.context + before.out
    if extends and request["shared"] >= before.context - BLOCK_TOKENS and context > whole - SLACK_TOKENS:
        return turn._replace(line=before.line, source=before.line, context=max(context, whole + 1), known=whole)
    return turn._replace(source=before.line, known=min(request["shared"], before.context, context - 1))


def _marked(turns: list[AgentTurn]) -> tuple[AgentTurn, ...]:
    """Marks the branches whose source goes on, and the ends of lines."""
    later: set[int] = set()
    for index in reversed(range(len(turns))):
        turn = turns[index] = turns[index]._replace(ends_line=turns[index].line not in later)
        if turn.source is not None:
            turns[index] = turn._replace(forks=turn.source != turn.line and turn.source in later)
            later.add(turn.source)
    return tuple(turns)
