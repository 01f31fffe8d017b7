"""Recorded sessions played over HTTP: prompts that extend and branch, gaps, and the figures, over a server of a few
lines.
"""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tailrace.app.cli import run
from tailrace.app.config import DEFAULT_CONFIG, load_config, with_engine
from tailrace.app.errors import Failed
from tailrace.lab.benchmarks.live import agents
from tailrace.lab.benchmarks.live.agent_replay import PlayedTurn, figures, play, scaled
from tailrace.lab.simulator.agents.trace import AgentSession, AgentTurn

FIRST = AgentTurn(after=None, gap_s=0.0, line=0, source=None, context=640, known=0, out=128)
NEXT = AgentTurn(after=0, gap_s=1.6, line=0, source=0, context=1280, known=768, out=64)
BRANCH = AgentTurn(after=0, gap_s=0.0, line=2, source=0, context=960, known=320, out=64)
SESSION = AgentSession("s", (FIRST, NEXT, BRANCH, NEXT._replace(after=1)))


def answer_of(prompt: list[int], tokens: int) -> list[int]:
    return [(sum(prompt) + place) % 1000 for place in range(tokens)]


def played(sessions, salt="x", answer=answer_of):
    """The requests in order of arrival, and what `play` returns, on a server that has the first 8 tokens cached."""
    seen = []

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body["prompt"])
        assert body["temperature"] == 0 and body["ignore_eos"] and request.headers["x-session"] == "0"
        response = web.StreamResponse()
        await response.prepare(request)
        details = {"usage": {"prompt_tokens_details": {"cached_tokens": 8}}, "choices": []}
        events = [{"choices": [{"token_ids": [one]}]} for one in answer(body["prompt"], body["max_tokens"])]
        for event in [{"choices": [{"token_ids": []}]}, *events, details]:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def story():
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]

        @asynccontextmanager
        async def opener(number):
            yield f"http://{host}:{port}/v1/completions", {"x-session": str(number)}

        try:
            return await play(sessions, salt, "m", opener)
        finally:
            await runner.cleanup()

    return seen, asyncio.run(story())


def test_tokens_and_gaps_are_divided_and_the_first_turns_kept():
    cut = scaled(SESSION, 3, 64, 8)
    assert [(one.context, one.known, one.out, one.gap_s) for one in cut.turns] == [
        (10, 0, 2, 0.0), (20, 12, 1, 0.2), (15, 5, 1, 0.0),
    ]  # fmt: skip
    tiny = scaled(SESSION, 2, 10_000, 1)
    assert [(one.context, one.known, one.out) for one in tiny.turns] == [(2, 0, 1), (2, 0, 1)]


def test_prompts_extend_the_context_or_branch_from_it():
    seen, (seconds, [turns]) = played([scaled(SESSION, 4, 64, 8)])
    first, branch, *others = seen  # the branch has no gap
    whole = first + answer_of(first, 2)
    assert len(first) == 10 and len(branch) == 15 and branch[:5] == first[:5] and branch[5] != first[5]
    later = whole + seen[2][12:] + answer_of(seen[2], 1)
    assert all(prompt[:12] == whole for prompt in others) and seen[3][: len(later)] == later
    assert [turn.known for turn in turns] == [0, 12, 5, 21] and seconds > 0.4
    assert [len(turn.token_ids) for turn in turns] == [2, 1, 1, 1] and all(turn.cached == 8 for turn in turns)


def test_the_same_salt_gives_the_same_prompts_and_another_one_others():
    cut = [scaled(SESSION, 2, 64, 1000)]
    assert played(cut)[0] == played(cut)[0] != played(cut, "y")[0]


def test_an_answer_of_another_length_is_an_error():
    with pytest.raises(Failed, match="s: 1 tokens came, of 2"):
        played([scaled(SESSION, 1, 64, 8)], answer=lambda prompt, tokens: [1])


def test_figures_count_what_was_computed_again():
    turns = [[PlayedTurn(1.0, 100, 0, 0, (1,)), PlayedTurn(3.0, 150, 101, 64, (1, 2))]]
    found = figures(36.0, turns)
    assert found["trajectories_per_h"] == 100.0 and found["ttft_p50_s"] == 2.0
    assert found["recomputed_share"] == round((100 + 86 - 149) / 101, 4)
    assert figures(36.0, turns, 149)["recomputed_share"] == 0.0


def test_a_system_has_the_figures_of_its_median_run_and_the_answers_of_all(monkeypatch):
    answers, rates = {"a-0": (1,), "a-1": (2,), "a-2": (3,), "warm-up": ()}, {"a-0": 30.0, "a-1": 10.0, "a-2": 20.0}

    async def run_of(sessions, salt, model, opener):
        return 3600 / rates.get(salt, 1.0), [[PlayedTurn(1.0, 10, 0, 0, answers[salt])]]

    monkeypatch.setattr(agents, "play", run_of)
    said = []
    plan = [("a", salt, [SESSION]) for salt in rates]
    runs = asyncio.run(agents._all(plan, "m", None, said.append))["a"]
    assert len(said) == 3
    slow = [({**of, "trajectories_per_h": of["trajectories_per_h"] / 2}, turns) for of, turns in runs]
    other = [*runs[:2], (runs[2][0], [[PlayedTurn(1.0, 10, 0, 0, (9,))]])]
    found = agents._size({"tailrace": runs, "round_robin_pool": slow, "sticky": other})
    assert found["runs_per_h"] == [30.0, 10.0, 20.0] and found["trajectories_per_h"] == 20.0
    assert found["rivals"]["round_robin_pool"]["trajectories_per_h"] == 10.0
    assert found["identical"] == {"tailrace": 1.0, "round_robin_pool": 1.0, "sticky": 0.6667}
    with pytest.raises(Failed, match="round_robin_pool made other tokens"):
        agents._size({"tailrace": runs, "round_robin_pool": other, "sticky": other})


@pytest.mark.parametrize(
    ("given", "named"),
    [(["--config", "serve.yaml"], "it needs a gateway"), (["--turns", "900"], "0 sessions of 900 turns")],
)
def test_what_cannot_be_played_is_named_before_anything_starts(tmp_path, capsys, monkeypatch, given, named):
    monkeypatch.setattr(agents, "_vllm", None)
    monkeypatch.setattr(agents, "resolve_model", lambda name: tmp_path)
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"id": "a", "requests": [{"in": 10, "out": 3, "parent": None, "shared": 0}]}))
    assert run(["bench", "agents", "--live", "--trace", str(path), *given]) != 0
    assert named in capsys.readouterr().err


def test_our_engines_compute_in_the_type_of_the_others_whatever_the_file_has():
    file = load_config(DEFAULT_CONFIG.with_name("serve.http.yaml"))
    application = with_engine(file, {"dtype": "bfloat16"}).application
    file = file.model_copy(update={"applications": (application, file.gateway)})
    engine = agents._with(file, 1024, 4096, 1).application.args.engine
    assert engine.dtype == agents.servers.DTYPE and engine.max_batched_tokens == agents.BATCHED_TOKENS
