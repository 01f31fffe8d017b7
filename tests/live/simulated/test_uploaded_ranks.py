"""Ranks without Ray publish by HTTP: real requests to a gateway's routes, the coordinator's book, and real files."""

import asyncio
import json
import socket
import threading
from base64 import b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx
import numpy as np
import pytest
import uvicorn
from safetensors.numpy import load_file

from tailrace.app.calls import publishing_rank
from tailrace.app.calls.refused import WeightsRejected, accepted
from tailrace.app.gateway import uploaded_ranks
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService
from tailrace.app.weights import over_http, uploads
from tailrace.app.weights.held_pieces import Slice
from tailrace.app.weights.over_http import HttpWeights
from tailrace.deployments.coordinator.publications import Publications
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.staging.base_weights import BaseWeights
from tailrace.deployments.staging.checksums import checksum as checksum_of
from tailrace.deployments.staging.deltas import delta_of
from tailrace.deployments.staging.slots import Slots, memory_source
from tailrace.deployments.staging.stage import Stage, StageRefused

WHOLE = {"a": np.arange(240, dtype=np.float32).reshape(40, 6), "b": np.arange(5, dtype=np.int8), "c": np.float32([[7]])}

BYTES = sum(array.nbytes for array in WHOLE.values())

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
        self.slots, self.loads, self.served = Slots("app-0", root), [], (4, "d")
        self.book = Publications(lambda: 4, self._load, asyncio.ensure_future, looked=lambda: asyncio.sleep(0))

    async def _load(self, version, source, digest, score):
        self.loads.append((version, source, score))
        self.served = version, memory_source(source).digest
        return WeightsLoaded(version=version, digest=digest, replicas=("r",), **TOLD)

    async def own_slots(self) -> str:
        return "app-0"

    async def status(self):
        return SimpleNamespace(weights_version=self.served[0], weights_digest=self.served[1])

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
    tokens.write_text("".join(f"{role} {role[0] * 16}\n" for role in Role))
    config = GatewayConfig(tokens_file=str(tokens), max_body_bytes=MAX_BODY_BYTES)
    client = BookClient(tmp_path)
    app = make_app(GatewayService(lambda role: client, config), config)
    bound = socket.create_server(("127.0.0.1", 0))
    port, server = bound.getsockname()[1], uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)

    trainer = f"http://{Role.TRAINER}:{'t' * 16}@127.0.0.1:{port}"
    weights = HttpWeights(trainer)

    def rank(number, held, version=5, by=weights, **more):
        try:
            return by.publish_blocking(version, held, number, **({"world_size": 2, "timeout_s": 120} | more))
        except Exception as error:  # noqa: BLE001 - compared by the test
            return error

    def all_ranks(*calls):
        with ThreadPoolExecutor(len(calls)) as pool:
            return [one.result() for one in [pool.submit(rank, *call[:-1], **call[-1]) for call in calls]]

    address = f"http://127.0.0.1:{port}"
    yield SimpleNamespace(
        trainer=trainer, client=client, all_ranks=all_ranks, root=tmp_path, address=address, weights=weights, app=app
    )
    server.should_exit = True
    thread.join()


@pytest.fixture
def bodies(monkeypatch) -> list[list[int]]:
    """Bytes of each part of each body, as they are sent; below zero for a delta's."""
    found, ask = [], over_http._ask

    def asks(http, method, path, **request):
        if "content" in request:
            sizes, deltas = ([value for key, value in request["params"] if key == name] for name in ("size", "delta"))
            assert sum(sizes) == len(request["content"])
            found.append([-size if delta else size for size, delta in zip(sizes, deltas, strict=True)])
        return ask(http, method, path, **request)

    monkeypatch.setattr(over_http, "_ask", asks)
    return found


def parts(bodies: list[list[int]]) -> list[int]:
    return [size for body in bodies for size in body]


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
    assert max(map(sum, bodies)) == largest and sum(parts(bodies)) == BYTES, "each value once"


def test_small_pieces_go_together(site, bodies, monkeypatch):
    monkeypatch.setattr(uploads, "MOST_PARTS", 2)
    many = {f"t{number}": np.int8([number]) for number in range(5)}
    (loaded,) = site.all_ranks((0, many, 5, {"world_size": 1}))
    assert loaded.version == 5 and sorted(map(len, bodies)) == [1, 2, 2]
    (folder,) = site.client.slots.held().values()
    (path,) = folder.glob("*.safetensors")
    assert {name: one.tolist() for name, one in load_file(path).items()} == {n: a.tolist() for n, a in many.items()}


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
    ask = over_http._ask

    def asks(http, method, path, **request):
        query = list(request.get("params", ()))
        if query[:2] == [("rank", 1), ("number", 0)]:
            size = query.index(("size", 240))
            data, rest = request["content"][:240], request["content"][240:]
            query[size] = "size", len(damage(data))
            request |= {"content": damage(data) + rest, "params": query}
        return ask(http, method, path, **request)

    monkeypatch.setattr(over_http, "_ask", asks)
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


@pytest.mark.parametrize("role", [Role.OBSERVER, Role.EVALUATOR])
def test_a_caller_of_a_lower_role_reaches_no_rank_of_a_trainer(site, role):
    """It was answered 200, and its checksum ended the piece: the rank's own bytes were dropped."""
    trainer, other = (httpx.Client(base_url=site.address, auth=(one, one[0] * 16)) for one in (Role.TRAINER, role))
    data = np.arange(4, dtype=np.float32).tobytes()
    checksum = checksum_of("a", "F32", [4], memoryview(data))
    join = {"rank": 0, "world_size": 1, "pieces": [["a", "F32", [4], [0], [4]]]}
    assert trainer.post("/weights/5/join", json=join).status_code == 200
    pieces = "/weights/5/pieces?rank=0&number=0&checksum="
    for path, given in (
        ("/weights/5/join", {"json": join}),
        (pieces + "x", {"content": bytes(16)}),
        ("/weights/5/loaded", {"json": {"rank": 0}}),
    ):
        answer = other.post(path, **given)
        reason = f"publish_weights needs role trainer, and this client is {role}"
        assert answer.status_code == 403 and json.loads(answer.text)["error"]["message"] == reason, answer.text
    assert trainer.post(pieces + checksum, content=data).status_code == 200
    assert trainer.post("/weights/5/loaded", json={"rank": 0}).status_code == 200
    (folder,) = site.client.slots.held().values()
    (path,) = folder.glob("*.safetensors")
    assert load_file(path)["a"].tobytes() == data


def rows(size: int, changed: int = 0) -> dict:
    """Two ranks' columns of one tensor of random bits, with some values changed."""
    bits = np.random.default_rng(0).integers(0, 2**16, (size, 6), np.uint16)
    bits[:changed, 2] ^= 1
    values = bits.view(np.float16)
    return [{"w": Slice(np.ascontiguousarray(values[:, :3]), (size, 6), (0, 0)), "b": np.int8([changed])},
            {"w": Slice(np.ascontiguousarray(values[:, 3:]), (size, 6), (0, 3)), "b": np.int8([changed])}]  # fmt: skip


@pytest.fixture
def with_deltas(site):
    """Publishes what two ranks hold, each by a client of its own that makes deltas. Returns their answers."""
    clients = [HttpWeights(site.trainer, deltas=True) for _ in range(2)]

    def publish(version: int, held: list[dict], **more):
        return site.all_ranks(*((n, one, version, {"by": clients[n]} | more) for n, one in enumerate(held)))

    return publish


def stored(site, version: int) -> bytes:
    """The bytes of `w` in the slot of a version."""
    ((_, folder),) = [item for item in site.client.slots.held().items() if item[0][0] == version]
    (path,) = folder.glob("*.safetensors")
    return load_file(path)["w"].tobytes()


def whole(held: list[dict]) -> bytes:
    return np.concatenate([one["w"].tensor for one in held], 1).tobytes()


def test_what_has_changed_since_the_last_version_is_uploaded_alone(site, bodies, with_deltas, monkeypatch):
    monkeypatch.setattr(uploads, "WINDOW_BYTES", 1000)
    size = 2000
    assert [one.version for one in with_deltas(5, rows(size))] == [5, 5]
    assert min(parts(bodies)) > 0 and sum(parts(bodies)) >= size * 12, "nothing is a base yet"
    bodies.clear()
    changed = rows(size, changed=9)
    assert [one.version for one in with_deltas(6, changed)] == [6, 6]
    deltas = [-one for one in parts(bodies) if one < 0]
    assert len(deltas) == 2 * size * 6 // 1000 and sum(map(abs, parts(bodies))) < size * 12 // 20
    assert stored(site, 6) == whole(changed) != whole(rows(size))


def test_a_refused_version_or_a_service_without_the_base_takes_all_bytes_again(site, bodies, with_deltas):
    with_deltas(5, rows(300))
    (late,) = with_deltas(6, rows(300, 5)[:1], timeout_s=1)
    assert isinstance(late, WeightsRejected)
    bodies.clear()
    assert [one.version for one in with_deltas(7, rows(300, 5))] == [7, 7]
    assert sum(one < 0 for one in parts(bodies)) == 1, "of the rank that did not take part in 6; its base is 5"
    site.client.slots.remove()
    bodies.clear()
    assert [one.version for one in with_deltas(8, rows(300, 6))] == [8, 8]
    assert min(parts(bodies)) > 0 and stored(site, 8) == whole(rows(300, 6))


def test_a_delta_on_other_bytes_ends_its_version_alone(site, bodies, with_deltas, monkeypatch):
    with_deltas(5, rows(300))
    read = BaseWeights.read
    with monkeypatch.context() as patched:
        patched.setattr(BaseWeights, "read", lambda *args: read(*args)[::-1])
        found = with_deltas(6, rows(300, 5))
    assert all("w from" in str(one) and "is staged with other bytes" in str(one) for one in found), found
    assert [version for version, _, _ in site.client.loads] == [5]
    assert [one.version for one in with_deltas(7, rows(300, 5))] == [7, 7], "all bytes again"
    assert stored(site, 7) == whole(rows(300, 5))


@pytest.mark.parametrize("breaks", [httpx.RemoteProtocolError, httpx.ConnectError])
def test_a_connection_that_breaks_ends_no_version(site, monkeypatch, with_deltas, breaks):
    """The answer is lost on its way, or the request."""
    monkeypatch.setattr(over_http, "AGAIN_S", (0.0, 0.0))
    request, calls = httpx.Client.request, Counter()

    def lost(http, method, path, **given):
        calls[call := f"{path} {given.get('params')} {given.get('json')}"] += 1
        if "join" in path or calls[call] == 3:
            return request(http, method, path, **given)
        if breaks is httpx.RemoteProtocolError and "loaded" not in path:
            request(http, method, path, **given)
        raise breaks("broken")

    monkeypatch.setattr(httpx.Client, "request", lost)
    for version, changed in ((5, 0), (6, 7)):
        assert [one.version for one in with_deltas(version, rows(40, changed))] == [version] * 2
        assert stored(site, version) == whole(rows(40, changed))


def test_what_is_no_delta_is_refused_in_one_line(site, with_deltas):
    held = {"w": np.zeros(50, np.float16)}
    (loaded,) = site.all_ranks((0, held, 5, {"world_size": 1}))
    http = httpx.Client(base_url=site.address, auth=("trainer", "t" * 16))
    join = {"rank": 0, "world_size": 1, "pieces": [["w", "F16", [50], [0], [50]]], "base": [5, loaded.digest]}
    assert http.post("/weights/6/join", json=join).json()["deltas"]
    for begin, body, reason in (
        (0, b"junk", "not a delta: "),
        (0, delta_of(bytes(102), bytes(102)), "has 100 bytes, and 102 have come"),
        (0, delta_of(bytes(100), bytes(100))[:-1], "not a delta: "),
        (2, delta_of(bytes(98), bytes(98)), "bytes from 2 on have come, and those from 0 on have not"),
    ):
        answer = http.post(f"/weights/6/pieces?rank=0&number=0&checksum=x&begin={begin}&delta=true", content=body)
        message = json.loads(answer.text)["error"]["message"]
        assert answer.status_code == 400 and "weights 6: rank 0: piece 0, w" in message and reason in message, message


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
    told = {"upload": [0], "max_body_bytes": MAX_BODY_BYTES, "deltas": False}
    assert http.post("/weights/5/join", json=join | {"base": [4, "d"]}).json() == told, "this node has no such weights"
    ask = "/weights/5/pieces?rank=0&checksum=x&number="
    assert refused(ask + "1", content=b"x").startswith("weights 5: rank 0: piece 1 is not to be uploaded")
    where = "weights 5: rank 0: piece 0, a"
    assert refused(ask + "0&delta=true", content=b"x") == f"{where}: deltas are not taken, as the answer to join says"
    early = f"{where}: bytes from 8 on have come, and those from 0 on have not"
    assert refused(ask + "0&begin=8", content=bytes(8)) == early
    assert http.post(ask + "0", content=bytes(12)).json() == {"written": [0]}
    assert refused("/weights/5/loaded", json={"rank": 0}) == f"{where}, has 16 bytes, and 12 have come"
    assert refused(ask + "0&begin=12", content=bytes(5)) == f"{where}, has 16 bytes, and 17 have come"
    for begin in (12, 12, 0):  # a repeated one changes nothing
        assert http.post(f"{ask}0&begin={begin}", content=bytes(4)).json() == {"written": [0]}
    two = "/weights/5/pieces?rank=0&number=0&number=0&checksum=x&checksum=x"
    assert refused(two, content=b"") == "a request of 2 parts: give number, checksum, begin, delta and size of each"
    odd = refused(two + "&size=3&size=4", content=bytes(8))
    assert odd == "the parts of a request have 7 bytes, and its body has 8"
    assert refused(two + "&size=-3&size=11", content=bytes(8)).startswith("a request of 2 parts")
    assert "is staged with other bytes" in refused("/weights/5/loaded", json={"rank": 0})
