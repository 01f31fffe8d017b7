"""Abuse of the gateway over the simulated cluster: thousands of bad requests leave nothing behind, and change no token.

Requests are raw ASGI calls, so a client may leave at any moment, send half a body, or read slowly.
"""

import asyncio
import json
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from tailrace.app.gateway import access_control, service
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.deployments.messages.liveness import LEASE_S
from tailrace.lab.fuzz.cluster import SimulatedCluster, SimulatedPrompts
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.log_disk import LogDisk
from tailrace.lab.fuzz.run import end_of, plan_of
from tailrace.lab.fuzz.virtual_time import VirtualLoop

TOKEN = "evaluator-" + "e" * 16
MAX_OPEN, MAX_BODY_BYTES = 40, 100_000


class Caller:
    """One request. `leave_s`: seconds after which the client has left; `pause_s`: between the parts of its body, and
    before each part of the answer is taken."""

    def __init__(self, app, path="/v1/completions", body=b"", headers=(), leave_s=None, pause_s=0.0, parts=1):
        self._app, self._path, self._headers = app, path, list(headers)
        self._leave_s, self._pause_s = leave_s, pause_s
        size = -(-max(1, len(body)) // parts)
        self._parts = [body[start : start + size] for start in range(0, max(1, len(body)), size)]
        self.status, self.answered, self.body = None, (), b""

    async def ask(self) -> "Caller":
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": self._path, "raw_path": self._path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json"), *self._headers],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        self._gone = asyncio.Event()
        if self._leave_s is not None:
            asyncio.get_running_loop().call_later(self._leave_s, self._gone.set)
        await self._app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> dict:
        if self._parts and not self._gone.is_set():
            await asyncio.sleep(self._pause_s)
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        await asyncio.sleep(self._pause_s)
        self.status, self.answered = message.get("status", self.status), message.get("headers", self.answered)
        self.body += message.get("body", b"")


def bearer(token: str = TOKEN) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {token}".encode()


def named(index: object, group: str = "g", seed: object = 1) -> list[tuple[bytes, bytes]]:
    found = {"seed": seed, "group": group, "index": index}
    return [bearer(), *((f"x-tailrace-{name}".encode(), str(value).encode()) for name, value in found.items())]


def normal(**changes) -> bytes:
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "return_token_ids": True}
    return json.dumps(body | changes).encode()


ABSURD = (
    normal(n=-1), normal(n=10**9), normal(max_tokens=0), normal(max_tokens=1e308), normal(temperature="hot"),
    normal(temperature=-1), normal(top_p=7), normal(prompt=[10**30]), normal(prompt=[-1]), normal(prompt=[]),
    normal(prompt={"a": 1}), normal(prompt=[[]]), normal(prompt=[5] * 600), normal(stop=["a"] * 999),
    normal(min_tokens=10**18), normal(logit_bias={"9999999": 1}), normal(stream_me=True), normal(seed=-1),
    normal(prompt=[[5]] * 2_000, n=1_024), normal(model="another"), normal(max_tokens=float("nan")),
    b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"prompt": ' + b"[" * 50_000, b'{"n": ' + b"9" * 6_000 + b"}",
    b'"' + b"a" * 50_000 + b'"',
)  # fmt: skip


BIG = b"a" * 10_000_000
MANY = [(f"x-{number}".encode(), b"v" * 50) for number in range(5_000)]
WRONG_NAMES = ((-1,), ("²",), ("9" * 5_000,), (1, "g", "x"))


def abuse(app, draw: Random) -> Caller:
    """A request that is wrong, or whose client is."""
    names = named(draw.randrange(12))
    kinds = (
        {"leave_s": draw.uniform(0.0, 4.0), "headers": names},
        {"leave_s": 0.5, "pause_s": 0.2, "parts": 8, "headers": names},  # leaves in the middle of the body
        {"body": normal(n=4), "pause_s": draw.uniform(0.0, 9.0), "headers": names},
        {"body": BIG, "parts": draw.choice((1, 50)), "headers": names},
        {"headers": [bearer(draw.choice(("", "wrong", "é", TOKEN + "x")))]},
        {"body": draw.choice(ABSURD), "headers": names},
        {"headers": MANY + names, "leave_s": 2.0},
        {"headers": named(*draw.choice(WRONG_NAMES))},
    )
    return Caller(app, **({"body": normal()} | draw.choice(kinds)))


def tokens_of(caller: Caller) -> list[list[int]]:
    assert caller.status == 200, caller.body
    return [choice["token_ids"] for choice in json.loads(caller.body)["choices"]]


async def tasks_at_rest() -> int:
    """Tasks once every lease is over, without those that come and go."""
    await asyncio.sleep(2 * LEASE_S)
    found = []
    for _ in range(50):
        found.append(len(asyncio.all_tasks()))
        await asyncio.sleep(0.17)
    return min(found)


@pytest.mark.parametrize("seed", range(2))
def test_abuse_leaves_nothing_behind_and_changes_no_token(tmp_path, monkeypatch, seed):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"evaluator {TOKEN}\n")
    monkeypatch.setattr(service, "Prompts", lambda *_: SimulatedPrompts())
    size = replace(plan_of(0).size, replicas=2, limits=None, mean_tokens=60, step_tokens=4, step_s=0.1, policies={})
    statuses = set()

    async def whole():
        cluster = SimulatedCluster(size, Random(seed), LogDisk("sound", tmp_path, Random(0)))
        config = GatewayConfig(tokens_file=str(tokens), max_open=MAX_OPEN, max_body_bytes=MAX_BODY_BYTES)
        app = make_app(service.GatewayService(lambda role: driver_client(cluster), config), config)

        async def all_of_a_group() -> list:
            callers = [Caller(app, body=normal(), headers=named(index)) for index in range(MAX_OPEN)]
            return [tokens_of(one) for one in await asyncio.gather(*(caller.ask() for caller in callers))]

        before = await all_of_a_group()
        tasks = await tasks_at_rest()
        draw = Random(seed)
        for _ in range(40):
            found = await asyncio.gather(*(abuse(app, draw).ask() for _ in range(draw.randrange(5, 60))))
            statuses.update(one.status for one in found)
        assert await all_of_a_group() == before
        leaver = await Caller(app, body=normal(), headers=named(99), leave_s=0.3).ask()
        await asyncio.sleep(0.3)
        status = await driver_client(cluster).status()
        assert leaver.status == 499 and status.running + status.waiting == 0
        assert await tasks_at_rest() == tasks
        assert not {name: count for name, count in cluster.coordinator.rollouts.books().items() if count}

    loop = VirtualLoop()
    loop.run_until_complete(whole())
    end_of(loop)
    assert statuses <= {200, 400, 401, 404, 413, 429, 499, None} and {200, 400, 401, 413, 429, 499} <= statuses


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(
    ("caller", "drained", "left"),
    [
        ({}, 10_000_000, range(1)),
        ({}, 1_000_000, range(44, 45)),  # parts of 200 kB, from the one that exceeds the limit on
        ({"pause_s": 3.0}, 10_000_000, range(40, 50)),
        ({"pause_s": 0.5, "leave_s": 2.0}, 10_000_000, range(40, 50)),
    ],
)
def test_a_body_beyond_the_limit_is_read_and_dropped_up_to_a_bound(monkeypatch, announced, caller, drained, left):
    """So a client that sends all before it reads has its answer, and one that never ends holds no place."""
    monkeypatch.setattr(access_control, "DRAINED_BYTES", drained)
    headers = [(b"content-length", str(len(BIG)).encode())] if announced else []

    async def story() -> Caller:
        config = GatewayConfig(max_body_bytes=MAX_BODY_BYTES)
        app = make_app(service.GatewayService(lambda role: None, config), config)
        return await Caller(app, body=BIG, parts=50, headers=headers, **caller).ask()

    found = VirtualLoop().run_until_complete(story())
    assert found.status == 413 and b"max_body_bytes" in found.body and (b"connection", b"close") in found.answered
    assert len(found._parts) in left


def test_the_tokenizer_is_loaded_once_also_if_its_first_caller_leaves(monkeypatch):
    loads, left = 0, asyncio.Event()

    async def in_thread(_, folder, max_model_len):
        nonlocal loads
        loads += 1
        await left.wait()
        return service.ServedModel("simulated", folder, max_model_len, SimulatedPrompts())

    class Away:
        async def status(self):
            return SimpleNamespace(model="/m/simulated", max_model_len=512)

    async def story() -> None:
        gateway = service.GatewayService(lambda role: Away(), GatewayConfig())
        first, second = (asyncio.ensure_future(gateway.model()) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        third = asyncio.ensure_future(gateway.model())
        await asyncio.sleep(0.01)
        left.set()
        assert (await second).name == (await third).name == "simulated" and first.cancelled() and loads == 1

    monkeypatch.setattr(service.asyncio, "to_thread", in_thread)
    asyncio.run(story())


def test_a_request_that_comes_just_as_the_tokenizer_is_there_is_answered(monkeypatch):
    late = []

    class Away:
        async def status(self):
            return SimpleNamespace(model="/m/simulated", max_model_len=512)

    class Service(service.GatewayService):
        async def _load(self):
            try:
                return await super()._load()
            finally:
                late.append(asyncio.ensure_future(self.model()))  # runs before whatever waits for the load's end

    async def story() -> None:
        gateway = Service(lambda role: Away(), GatewayConfig())
        assert (await gateway.model()).name == (await late[0]).name == "simulated"

    monkeypatch.setattr(service, "Prompts", lambda *_: SimulatedPrompts())
    asyncio.run(story())
