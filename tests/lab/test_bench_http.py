"""The load and the figures of `bench http`, over a server of a few lines."""

import asyncio
import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from resource import RLIM_INFINITY

import pytest
from aiohttp import web

from tailrace.app import cluster
from tailrace.app.config import DEFAULT_CONFIG, load_config, with_engine
from tailrace.app.errors import Failed
from tailrace.deployments.replica_count import fixed
from tailrace.lab.benchmarks.http import http, servers
from tailrace.lab.benchmarks.http.load import GROUP, body_of, load


async def served(completions, **settings) -> dict:
    """The figures of one load on a server whose one route is `completions`."""
    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0]
        return await load(f"http://{host}:{port}", "m", 1, **settings)
    finally:
        await runner.cleanup()


def test_every_request_is_counted_as_an_answer_or_an_error():
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        number = len(seen)
        if number % 4 == 0:
            return web.json_response({"error": {}}, status=429)
        if number % 4 == 1:
            return web.json_response({"usage": {"completion_tokens": 3}})  # too few
        if number % 4 == 2:
            return web.Response(text="no JSON")
        return web.json_response({"usage": {"completion_tokens": 5}})

    found = asyncio.run(served(answer, requests=40, max_tokens=5))
    assert len(found["latencies_s"]) == 10 and all(0 < one <= found["seconds"] for one in found["latencies_s"])
    assert found["errors"] == {"429": 10, "200": 10, "JSONDecodeError": 10}
    assert sorted(map(json.dumps, seen)) == sorted(json.dumps(body_of("m", 1, number, 5)) for number in range(40))


def test_all_requests_are_open_at_once():
    waiting = 0

    async def story() -> dict:
        every = asyncio.Event()

        async def completions(request: web.Request) -> web.Response:
            nonlocal waiting
            waiting += 1
            if waiting == 50:
                every.set()
            await every.wait()
            return web.json_response({"usage": {"completion_tokens": 5}})

        return await asyncio.wait_for(served(completions, requests=50, max_tokens=5), 120)

    assert len(asyncio.run(story())["latencies_s"]) == 50


def test_prompts_are_a_group_s_and_of_one_turn():
    prompts = [tuple(body_of("m", turn, number, 5)["prompt"]) for turn in (1, 2) for number in range(2 * GROUP)]
    assert len(set(prompts)) == 4 and len(set(prompts[:GROUP])) == 1


def test_both_engines_have_the_same_settings_whatever_the_file_has(monkeypatch, tmp_path):
    commands, files = [], []
    for name, value in servers.NICENESS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(servers, "await_health", lambda *_: None)
    monkeypatch.setattr(servers, "end_group", lambda _: None)
    monkeypatch.setattr(servers.subprocess, "Popen", lambda command, **_: commands.append(command))
    monkeypatch.setattr(cluster, "service", lambda file, _: files.append(file) or nullcontext())
    file = with_engine(load_config(DEFAULT_CONFIG), {"dtype": "bfloat16", "max_batched_tokens": 16_384})
    shape = servers.EngineShape(Path("/tiny"), 64)
    with servers.vllm(shape, tmp_path / "log"), servers.ours(file, shape):
        pass
    (command,), (ours,) = commands, (one.application.args for one in files)
    theirs = dict(pairwise(command))
    for flag, name in {
        "--dtype": "dtype",
        "--max-num-batched-tokens": "max_batched_tokens",
        "--max-num-seqs": "max_running",
        "--max-model-len": "max_model_len",
        "--block-size": "block_tokens",
        "--model": "model",
    }.items():
        assert theirs[flag] == str(getattr(ours.engine, name)), name
    assert float(theirs["--kv-cache-memory-bytes"]) == ours.engine.kv_cache_gib * 2**30 and ours.replicas == fixed(1)


def test_figures_are_medians_of_the_turns(monkeypatch):
    seconds = {"http://a": iter((9.9, 2.0, 1.0, 4.0)), "http://b": iter((9.9, 1.0, 1.0, 1.0))}  # a warm-up, three turns
    order = []

    def loaded(address, model, turn, requests):
        order.append(address[-1])
        return {"seconds": next(seconds[address]), "latencies_s": [0.1 * turn] * requests.count, "errors": {"429": 1}}

    monkeypatch.setattr(http, "loaded", loaded)
    found = http.turns({"ours": "http://a", "theirs": "http://b"}, "m", http.HttpLoad(100, 16), 3, lambda text: None)
    assert "".join(order) == "ab" * 4 and found["theirs"]["requests_per_s"] == 100.0
    assert found["ours"] == {
        "requests_per_s": 50.0, "turns": [50.0, 100.0, 25.0], "tokens_per_s": 800.0, "p50_s": 0.2, "p99_s": 0.2,
        "errors": {"429": 3},
    }  # fmt: skip


def test_a_server_that_answers_nothing_and_too_few_files_are_one_line(monkeypatch):
    monkeypatch.setattr(http, "loaded", lambda *_: {"seconds": 1.0, "latencies_s": [], "errors": {"500": 8}})
    with pytest.raises(Failed, match=r"ours: no request was answered: \{'500': 8\}"):
        http.turns({"ours": "http://a"}, "m", http.HttpLoad(8, 16), 1, lambda text: None)
    monkeypatch.setattr(http.resource, "getrlimit", lambda _: (1_024, 4_096))
    with pytest.raises(Failed, match="5000 open files are needed, and the limit is 4096"):
        http.allow_files(5_000)


@pytest.mark.parametrize(("soft", "hard", "changed"), [
    (1_024, 8_192, [(5_000, 8_192)]), (6_000, 8_192, []), (RLIM_INFINITY, RLIM_INFINITY, []),
    (1_024, RLIM_INFINITY, [(5_000, RLIM_INFINITY)]),
])  # fmt: skip
def test_the_limit_of_files_is_raised_and_never_lowered(monkeypatch, soft, hard, changed):
    found = []
    monkeypatch.setattr(http.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(http.resource, "setrlimit", lambda _, limits: found.append(limits))
    http.allow_files(5_000)
    assert found == changed
