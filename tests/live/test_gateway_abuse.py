"""Abuse of a service's gateway, over real sockets: what it held is given back, and no token changes.

The same over the simulated cluster, where every book can be read: test_gateway_abuse_simulated.py.
"""

import asyncio
import contextlib
import json
from collections import Counter
from random import Random

import psutil
import pytest
from gateway_service import TOKENS, gateway
from simulated.test_gateway_abuse import ABSURD
from waiting import until

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.http import Client

pytestmark = pytest.mark.long

MAX_OPEN = 30
EACH = 4
"""Of each abuse at once: more than the gateway takes, together."""

GROUPS = (PromptGroup(prompt_id="g", token_ids=(5, 300, 7, 41), samples=12, max_tokens=60),)
SERVERS = ("ray::ServeReplica:gateway", "ray::ServeReplica:tailrace:Coordinator")
ODD_FORMS = (
    {"regex": "(a{1,500}b){1,500}"},
    {"json": json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}})},
    {"json": "[" * 3_000},
    {"grammar": 'root ::= "a" root'},
    {"choice": ["a" * 2_000] * 5},
)


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory):
    with gateway(tiny_model, tmp_path_factory.mktemp("abused"), max_open=MAX_OPEN, max_body_bytes=1 << 20) as found:
        yield found


def completion(**changes) -> bytes:
    return json.dumps({"prompt": [5, 6, 7], "max_tokens": 80} | changes).encode()


def http(body: bytes, token: str = TOKENS["evaluator"], size: int | None = None, more: str = "") -> bytes:
    """The bytes of a request. `size`: its content-length, if it is to be wrong."""
    head = (
        "POST /v1/completions HTTP/1.1", "host: a", "connection: close", f"authorization: Bearer {token}",
        "content-type: application/json", f"content-length: {len(body) if size is None else size}",
    )  # fmt: skip
    return ("\r\n".join(head) + f"\r\n{more}\r\n").encode() + body


class Wire:
    """One raw connection, which is broken off at the end."""

    def __init__(self, url: str):
        self._port = int(url.rpartition(":")[2])

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 12)
        return self

    async def __aexit__(self, *error) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> str:
        """Of the answer; empty if there is none."""
        return (await asyncio.wait_for(self.reader.readline(), 60)).decode()[9:12]


async def leaves(url: str, draw: Random) -> str:
    async with Wire(url) as wire:
        await wire.send(http(completion(n=draw.choice((1, 8)))))
        await asyncio.sleep(draw.uniform(0.0, 0.6))
    return "left"


async def leaves_in_the_body(url: str, draw: Random) -> str:
    async with Wire(url) as wire:
        await wire.send(http(completion()[:20], size=5_000))
        await asyncio.sleep(draw.uniform(0.0, 0.4))
    return "left"


async def reads_slowly(url: str, draw: Random) -> str:
    async with Wire(url) as wire:
        await wire.send(http(completion(n=6, logprobs=1, return_token_ids=True)))
        status = await wire.status()
        for _ in range(draw.randrange(5, 40)):
            await asyncio.wait_for(wire.reader.read(100), 60)
            await asyncio.sleep(0.05)
    return status


async def never_ends_its_headers(url: str, draw: Random) -> str:
    async with Wire(url) as wire:
        await wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
        for number in range(draw.randrange(1, 8)):
            await asyncio.sleep(0.2)
            await wire.send(f"x-{number}: a\r\n".encode())
    return "left"


async def sends_ten_megabytes(url: str, draw: Random) -> str:
    async with Wire(url) as wire:
        body = b"a" * 10_000_000
        if draw.random() < 0.5:
            head = http(b"", size=0).replace(b"content-length: 0", b"transfer-encoding: chunked")
            body = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        else:
            body = http(body)
        with contextlib.suppress(ConnectionError):
            await wire.send(body)
            return await wire.status()
    return "closed"


async def asks(url: str, data: bytes) -> str:
    async with Wire(url) as wire:
        with contextlib.suppress(ConnectionError):
            await wire.send(data)
            return await wire.status()
    return "closed"


async def asks_absurdly(url: str, draw: Random) -> str:
    return await asks(url, http(draw.choice(ABSURD)))


async def asks_for_an_odd_form(url: str, draw: Random) -> str:
    return await asks(url, http(completion(structured_outputs=draw.choice(ODD_FORMS), max_tokens=4)))


async def has_a_wrong_token(url: str, draw: Random) -> str:
    return await asks(url, http(completion(), token=draw.choice(("", "wrong", TOKENS["observer"]))))


async def has_thousands_of_headers(url: str, draw: Random) -> str:
    return await asks(url, http(completion(max_tokens=2), more="".join(f"x-{n}: a\r\n" for n in range(5_000))))


async def speaks_another_protocol(url: str, draw: Random) -> str:
    return await asks(url, draw.randbytes(300) + b"\r\n\r\n")


ABUSES = (
    leaves, leaves_in_the_body, reads_slowly, never_ends_its_headers, sends_ten_megabytes, asks_absurdly,
    asks_for_an_odd_form, has_a_wrong_token, has_thousands_of_headers, speaks_another_protocol,
)  # fmt: skip


ANSWERS = {
    reads_slowly: ("200",),
    sends_ten_megabytes: ("413",),
    asks_absurdly: ("400", "404"),
    asks_for_an_odd_form: ("200", "400"),
    has_a_wrong_token: ("401", "403"),
    has_thousands_of_headers: ("200", "400", "431"),
}
"""Statuses of those that wait for one, besides 429 and a closed connection."""


async def abused(url: str, rounds: int) -> dict[str, Counter]:
    """What came of each abuse, `rounds` times a few of each at once."""
    draw, found = Random(5), {each.__name__: Counter() for each in ABUSES}
    for _ in range(rounds):
        calls = [(each, each(url, draw)) for each in ABUSES for _ in range(EACH)]
        for (each, _), result in zip(calls, await asyncio.gather(*(call for _, call in calls)), strict=True):
            found[each.__name__][result] += 1
        print({name: dict(counts) for name, counts in found.items()}, flush=True)
    return found


def held() -> dict[str, tuple[int, int]]:
    """Open files and threads of each server of this test's cluster."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = (process.cmdline() or [""])[0]  # with the name of the call that it runs
            for server in filter(title.startswith, SERVERS):
                found[server] = process.num_fds(), process.num_threads()
    assert len(found) == len(SERVERS), found
    return found


def test_abuse_is_borne(served):
    url, service = served
    client = Client(url, TOKENS["evaluator"])
    batch = RolloutBatch(batch_id="before", groups=GROUPS, seed=3)

    def tokens() -> list[tuple[int, ...]]:
        (group,) = client.rollout_blocking(batch)
        return [sample.token_ids for sample in group.samples]

    first = asyncio.run(abused(url, 1))  # pools and caches of the servers have their sizes by then
    expected = tokens()
    (by_ray,) = service.rollout_blocking(batch)
    assert expected == [sample.token_ids for sample in by_ray.samples]
    before = held()
    found = asyncio.run(abused(url, 4))
    until(lambda: (status := service.status_blocking()).running + status.waiting == 0)
    assert tokens() == expected
    until(lambda: all(now <= then + 3 for name in before for now, then in zip(held()[name], before[name], strict=True)))
    assert service.status_blocking().contained == {}
    for each, statuses in ANSWERS.items():
        assert {*first[each.__name__], *found[each.__name__]} <= {"429", "closed", *statuses}, each.__name__
    assert found["reads_slowly"]["200"] and found["asks_absurdly"]["400"] and found["has_a_wrong_token"]["401"]
    client.close()
