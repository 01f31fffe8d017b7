"""Ranks without Ray publish by HTTP: real requests to a gateway's routes, the coordinator's book, and real files."""

import asyncio
import json
import socket
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx
import numpy as np
import pytest
import uvicorn

from tailrace.app.calls import publishing_rank
from tailrace.app.calls.refused import WeightsRejected, accepted
from tailrace.app.gateway import uploaded_ranks
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService
from tailrace.app.weights import over_http
from tailrace.app.weights.held_pieces import Slice
from tailrace.app.weights.over_http import HttpWeights
from tailrace.deployments.coordinator.publications import Publications
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.staging.slots import Slots, memory_source
from tailrace.deployments.staging.stage import Stage, StageRefused

WHOLE = {"a": np.arange(240, dtype=np.float32).reshape(40, 6), "b": np.arange(5, dtype=np.int8), "c": np.float32([[7]])}

MAX_BODY_BYTES = 333
"""What this gateway takes: the lists of pieces below, and a half of `a` in three bodies, cut within rows and values."""

TOLD = {"paused_s": {"r": 0.5}, "set_aside": {"s": "its score differs"}, "warnings": {"r": "its score was late"}}


def halves() -> list[dict]:
    """Rows of `a` for two ranks, which both have `b`; `c` is of the second."""
    return [{"a": Slice(WHOLE["a"][:30], (40, 6), (0, 0)), "b": WHOLE["b"]},
            {"a": Slice(WHOLE["a"][30:], (40, 6), (30, 0)), "b": WHOLE["b"], "c": WHOLE["c"]}]  # fmt: skip


class BookClient:
    """A client of a service that is the coordinator's book, and that records its loads."""

    def __init__(self, root):
        self.slots, self.loads = Slots("app-0", root), []
        self.book = Publications(lambda: 4, self._load, asyncio.ensure_future)

    async def _load(self, version, source, digest, score):
        self.loads.append((version, source, score))
        return WeightsLoaded(version=version, digest=digest, replicas=("r",), **TOLD)

    async def own_slots(self) -> str:
        return "app-0"

    async def status(self):
        return SimpleNamespace(weights_version=4, weights_digest="d")

    @property
    def publishing(self):
        return self

    async def run(self, phase, version, rank, content=None):
        return accepted(await self.book.run(phase, version, rank, content), "publish_weights")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A gateway, its client of the service, and `all_ranks`, which runs a call of each rank side by side."""
    monkeypatch.setattr(publishing_rank, "Slots", lambda service: Slots(service, tmp_path))
    monkeypatch.setattr(uploaded_ranks, "this_node", lambda: "here")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"trainer {'t' * 16}\n")
    config = GatewayConfig(tokens_file=str(tokens), max_body_bytes=MAX_BODY_BYTES)
    client = BookClient(tmp_path)
    app = make_app(GatewayService(lambda role: client, config), config)
    bound = socket.create_server(("127.0.0.1", 0))
    port, server = bound.getsockname()[1], uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)

    weights = HttpWeights(f"http://{Role.TRAINER}:{'t' * 16}@127.0.0.1:{port}")

    def rank(number, held, version=5, **more):
        try:
            return weights.publish_blocking(version, held, number, 2, **({"timeout_s": 120} | more))
        except Exception as error:  # noqa: BLE001 - compared by the test
            return error

    def all_ranks(*calls):
        with ThreadPoolExecutor(len(calls)) as pool:
            return [one.result() for one in [pool.submit(rank, *call[:-1], **call[-1]) for call in calls]]

    address = f"http://127.0.0.1:{port}"
    yield SimpleNamespace(client=client, all_ranks=all_ranks, root=tmp_path, address=address, weights=weights, app=app)
    server.should_exit = True
    thread.join()


@pytest.fixture
def bodies(monkeypatch) -> list[int]:
    """Bytes of each body of a piece, as they are sent."""
    found, send = [], HttpWeights._send

    def sends(self, method, path, data, kind):
        if kind == "application/octet-stream":
            found.append(len(data))
        return send(self, method, path, data, kind)

    monkeypatch.setattr(HttpWeights, "_send", sends)
    return found


def digest_of_one_process(root) -> str:
    stage = Stage(Slots("alone", root), 5, (0, ""))
    for name, array in WHOLE.items():
        stage.add(name, array)
    return stage.seal().digest


def both(version=5, **more) -> list[tuple]:
    return [(number, held, version, more) for number, held in enumerate(halves())]


def test_uploaded_pieces_are_the_weights_that_one_process_would_send(site):
    found = site.all_ranks(*both(score=(-1.0,)))
    ((version, source, score),) = site.client.loads
    assert [(one.version, one.replicas) for one in found] == [(5, ("r",))] * 2
    assert [{name: getattr(one, name) for name in TOLD} for one in found] == [TOLD] * 2
    assert {one.digest for one in found} == {memory_source(source).digest, digest_of_one_process(site.root)}
    assert (version, score) == (5, (-1.0,)) and not site.client.slots.part.exists()
    assert [one.version for one in site.all_ranks(*both(6))] == [6, 6], "and the next one goes on"


@pytest.mark.parametrize(("most", "largest"), [(over_http.UPLOAD_BYTES, MAX_BODY_BYTES), (100, 100)])
def test_a_body_is_no_larger_than_the_gateway_and_the_client_s_own_limit_allow(
    site, monkeypatch, bodies, most, largest
):
    monkeypatch.setattr(over_http, "UPLOAD_BYTES", most)
    assert [one.version for one in site.all_ranks(*both())] == [5, 5]
    ((_, source, _),) = site.client.loads
    assert memory_source(source).digest == digest_of_one_process(site.root)
    assert max(bodies) == largest and sum(bodies) == sum(array.nbytes for array in WHOLE.values()), "each value once"


def test_a_list_of_pieces_that_the_gateway_does_not_take_ends_its_version_alone(site):
    name, (held, other) = "x" * MAX_BODY_BYTES, halves()
    found = site.all_ranks((0, held | {name: np.zeros(1, np.int8)}, 5, {}), (1, other, 5, {}))
    assert all(isinstance(one, WeightsRejected) for one in found), found
    size = int(str(found[0]).partition(" has ")[2].split()[0])
    reason = f"the body of /weights/5/join has {size} bytes, and max_body_bytes of the gateway is {MAX_BODY_BYTES}: "
    reason += "raise it in the gateway's args, or send less"
    assert size > MAX_BODY_BYTES and str(found[0]) == reason
    assert str(found[1]) == f"weights 5: rank 0: {reason}; the service keeps its weights"
    assert [one.version for one in site.all_ranks(*both(6))] == [6, 6]
    assert [version for version, _, _ in site.client.loads] == [6]


def by_httpx(url: str, body) -> tuple[int, str]:
    """Status and text of the answer. `body`: bytes, or an iterator of them, whose length is not announced."""
    answer = httpx.post(url, content=body, auth=("trainer", "t" * 16), timeout=60)
    return answer.status_code, answer.text


def by_urllib(url: str, body) -> tuple[int, str]:
    token = b64encode(f"trainer:{'t' * 16}".encode()).decode()
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(url, body, {"authorization": f"Basic {token}"}), timeout=60)
    return refused.value.code, refused.value.read().decode()


@pytest.mark.parametrize("call", [by_httpx, by_urllib])
@pytest.mark.parametrize("path", ["/weights/5/join", "/weights/5/pieces?rank=0&number=0&checksum=x"])
def test_a_client_reads_why_its_body_is_too_large(site, call, path):
    """Urllib sends all of a body before it reads, and would find its connection reset."""
    parts = [bytes(1_000_000)] * 10
    for body, size in ((b"".join(parts), "10,000,000"), (iter(parts), f"more than {MAX_BODY_BYTES}")):
        status, text = call(site.address + path, body)
        reason = f"the body of {path.partition('?')[0]} has {size} bytes, and max_body_bytes of the gateway is "
        assert status == 413 and json.loads(text)["error"]["message"].startswith(reason), text


def test_the_next_version_is_above_what_is_served_and_above_what_has_ended(site):
    assert site.weights.next_version_blocking() == 5, "the service has 4"
    (late,) = site.all_ranks((0, halves()[0], 8, {"timeout_s": 1}))
    assert isinstance(late, WeightsRejected)
    version = site.weights.next_version_blocking()
    assert version == 9, "8 has ended"
    assert [one.version for one in site.all_ranks(*both(version))] == [9, 9]
    assert site.weights.next_version_blocking() == 10


def test_a_rank_that_does_not_come_or_cannot_stage_is_named_to_the_others(site):
    (late,) = site.all_ranks((0, halves()[0], 5, {"timeout_s": 1}))
    assert isinstance(late, WeightsRejected)
    assert str(late) == "weights 5: rank 1 has not joined within 1 s; the service keeps its weights"
    other, own = site.all_ranks((0, halves()[0], 6, {}), (1, {"c": SimpleNamespace(shape=())}, 6, {}))
    assert isinstance(own, StageRefused) and "tensor c is a SimpleNamespace" in str(own)
    assert str(other).startswith("weights 6: rank 1: tensor c is a SimpleNamespace of no type; the service keeps")
    assert site.client.loads == []
    assert [one.version for one in site.all_ranks(*both(7))] == [7, 7]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "weights 5: rank 1: piece 0, a from [30, 0], has 240 bytes, and 239 have come"),
        (lambda data: data + b"x", "weights 5: rank 1: piece 0, a from [30, 0], has 240 bytes, and 241 have come"),
        (lambda data: bytes(len(data)), "is staged with other bytes"),
    ],
)
def test_a_damaged_piece_is_refused_in_one_line(site, monkeypatch, damage, reason):
    send = HttpWeights._send

    def sends(self, method, path, data, kind):
        damaged = kind == "application/octet-stream" and "rank=1&number=0" in path
        return send(self, method, path, damage(bytes(data)) if damaged else data, kind)

    monkeypatch.setattr(HttpWeights, "_send", sends)
    found = site.all_ranks(*both())
    assert all(isinstance(one, WeightsRejected) for one in found) and site.client.loads == []
    assert reason in str(found[1]) and "\n" not in str(found[1])
    assert "rank 1" in str(found[0]) and str(found[0]).count("weights 5: ") <= 1, "the other rank hears it, too"
    assert not site.client.slots.part.exists()


def test_a_rank_that_leaves_in_the_middle_of_a_body_is_an_error_of_its_own(site):
    """It was one of the gateway: status 500 in the metrics, and a stack trace in the log."""
    parts = iter([{"type": "http.request", "body": b"12", "more_body": True}, {"type": "http.disconnect"}])
    headers = {"authorization": f"Bearer {'t' * 16}", "content-length": "100"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/weights/5/pieces",
        "query_string": b"rank=0&number=0&checksum=x",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 9),
    }
    sent = []

    async def left() -> None:
        async def receive():
            return next(parts)

        async def send(message):
            sent.append(message)

        await site.app(scope, receive, send)

    asyncio.run(left())
    assert sent[0]["status"] == 400 and b"the connection ended before the whole body had come" in sent[1]["body"]


def test_what_does_not_fit_is_refused_with_the_field(site):
    http = httpx.Client(base_url=site.address, auth=("trainer", "t" * 16))

    def refused(path, **body) -> str:
        answer = http.post(path, **body)
        assert answer.status_code == 400
        return json.loads(answer.text)["error"]["message"]

    piece = ["a", "F32", [4], [0], [4]]
    join = {"rank": 0, "world_size": 1, "pieces": [piece]}
    assert "version: Input should be greater than or equal to 1" in refused("/weights/0/join", json=join)
    odd = {**join, "pieces": [["a", "F33", [4], [0], [4]]]}
    assert refused("/weights/5/join", json=odd).startswith("pieces: a: give a type of safetensors")
    assert refused("/weights/4/join", json=join) == "weights version 4 is not above 4; versions only grow"
    absent = "weights 5: rank 3 has not joined it here; all its calls go to one gateway"
    assert refused("/weights/5/loaded", json={"rank": 3}) == absent
    assert refused("/weights/5/failed", json={"rank": 0}).startswith("reason: ")
    assert http.post("/weights/5/join", json=join).json() == {"upload": [0], "max_body_bytes": MAX_BODY_BYTES}
    ask = "/weights/5/pieces?rank=0&checksum=x&number="
    assert refused(ask + "1", content=b"x").startswith("weights 5: rank 0: piece 1 is not to be uploaded")
    where = "weights 5: rank 0: piece 0, a"
    early = f"{where}: bytes from 8 on have come, and those from 0 on have not"
    assert refused(ask + "0&begin=8", content=bytes(8)) == early
    assert http.post(ask + "0", content=bytes(12)).json() == {"written": 0}
    assert refused("/weights/5/loaded", json={"rank": 0}) == f"{where}, has 16 bytes, and 12 have come"
    assert refused(ask + "0&begin=12", content=bytes(5)) == f"{where}, has 16 bytes, and 17 have come"
    for begin in (12, 12, 0):  # a repeated one changes nothing
        assert http.post(f"{ask}0&begin={begin}", content=bytes(4)).json() == {"written": 0}
    assert "is staged with other bytes" in refused("/weights/5/loaded", json={"rank": 0})
