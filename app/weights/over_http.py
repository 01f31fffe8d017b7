"""A trainer's weights, brought to a service by its gateway: HTTP for the calls, shared memory or a folder for tensors.

    weights = HttpWeights("http://trainer:TOKEN@127.0.0.1:8000")      # no Ray at the trainer
    weights.send_weights_blocking(weights.status_blocking().weights_version + 1, tailrace.saved_weights(model))

Invariant: an update that is refused or breaks off leaves the service under its former weights. Takes the place of a
`RolloutClient` for `AsyncWeights`, and for `MemoryTrainerEngine` over vLLM's `HTTPVLLMWeightSyncClient`.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import httpx

from tailrace.app.calls.refused import WeightsRejected, error_of_status
from tailrace.app.calls.staged_weights import StagedWeights, Tensors, staged_in
from tailrace.app.http.weights_answer import loaded_of
from tailrace.app.weights.held_pieces import HeldPiece, held_pieces
from tailrace.app.weights.uploads import Part, SentPieces, packed, whole_bodies
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.messages.scores import Score
from tailrace.deployments.staging.piece_files import bytes_of, checksum_of_piece
from tailrace.deployments.staging.slots import Slots
from tailrace.deployments.staging.stage import StageRefused, as_bytes

TIMEOUT_S = 900.0
"""Maximum seconds to wait for an answer: replicas may load for ten minutes."""


UPLOAD_BYTES = 8 << 20
"""Maximum bytes of an upload's body, also if the gateway takes larger ones: both ends hold it in memory."""

RAW = {"content-type": "application/octet-stream"}

AGAIN_S = (1.0, 4.0, 15.0)
"""Pauses before an upload is sent again, or the end is asked for again, if the connection breaks."""

FULL_S, FULL_PAUSE_S = 600.0, 1.0
"""Maximum seconds for which a gateway that is full, and has done nothing yet, is asked again; and between two tries."""

CONNECTIONS = 8
"""Maximum uploads of a rank at a time, so that a far gateway's answers are not waited for in turn."""


class ServedWeights(NamedTuple):
    """The present weights of a service, as its status names them."""

    weights_version: int
    weights_digest: str


class HttpWeights:
    """`address`: a gateway's address. If tokens are required, it holds a trainer's:
    `http://trainer:TOKEN@HOST:PORT`. `deltas`: `publish_blocking` keeps a copy of what this rank uploads, and sends
    what has changed since: few percent of bfloat16 weights, for a link slower than a core compresses (0.4 GB/s).
    """

    def __init__(self, address: str, *, deltas: bool = False):
        parts = urlsplit(address)
        plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        auth = (parts.username or "", unquote(parts.password)) if parts.password else None
        self._gateway = {"base_url": plain, "auth": auth, "timeout": TIMEOUT_S}
        self._sent = SentPieces() if deltas else None

    def status_blocking(self) -> ServedWeights:
        found = self._call("GET", "/weight_info")
        return ServedWeights(int(found["weight_version"]), found["weights_digest"])

    def stage_weights_blocking(self, version: int, tensors: Tensors) -> StagedWeights:
        """Copies tensors into this machine's shared memory, see `RolloutClient.stage_weights`.

        The gateway has to run on the same machine.
        """
        slots = Slots(self._call("POST", "/weight_slots")["slots"])
        return staged_in(slots, version, tuple(self.status_blocking()), tensors)

    def send_weights_blocking(self, version: int, tensors: Tensors) -> WeightsLoaded:
        """Loads (name, tensor) pairs, through memory. Raises WeightsRejected; the former weights then stay."""
        staged = self.stage_weights_blocking(version, tensors)
        try:
            loaded = self.update_weights_blocking(version, str(staged.stage.seal()))
        finally:
            staged.drop()  # keeps a sealed slot, which the next stage may take from here on
        return loaded.model_copy(update={"staged_s": staged.seconds})

    def next_version_blocking(self) -> int:
        """Returns the lowest version that can be published, see `tailrace.weights.next_version`."""
        return int(self._call("GET", "/weights/next")["weight_version"])

    def publish_blocking(
        self, version: int, held: object, rank: int, world_size: int, *, score: Score = (), timeout_s: float = 120.0
    ) -> WeightsLoaded:
        """Publishes a version from one of `world_size` ranks, which all call this, each with what it holds: nothing is
        gathered, and each value is uploaded once. The arguments and the rules are those of `tailrace.weights.publish`.

        Raises WeightsRejected, one line, on every rank, if the version has ended; the former weights then stay.
        """
        try:
            return self._publish(version, held, {"rank": rank, "world_size": world_size, "timeout_s": timeout_s}, score)
        except PermissionError:
            raise
        except Exception as error:  # of this rank: the others have to hear of it, and it is raised again
            reason = str(error) if isinstance(error, StageRefused | WeightsRejected) else one_line(error)
            reason = reason.removeprefix(f"weights {version}: rank {rank}: ")
            with suppress(Exception):  # the gateway is unreachable, or the version has ended
                self._call("POST", f"/weights/{version}/failed", {"rank": rank, "reason": reason})
            raise

    def _publish(self, version: int, held: object, named: dict, score: Score) -> WeightsLoaded:
        pieces = held_pieces(held)
        listed = [(*one.piece.tensor, one.piece.start, one.piece.extent) for one in pieces]
        join = {**named, "score": list(score), "pieces": listed} | self._base()
        patient = self._gateway | {"timeout": TIMEOUT_S + named["timeout_s"]}  # the join waits for the other ranks
        with httpx.Client(**patient) as http, ThreadPoolExecutor(CONNECTIONS, "upload") as uploads:
            joined = _ask(http, "POST", f"/weights/{version}/join", json=join)
            size = min(UPLOAD_BYTES, joined["max_body_bytes"])
            together = packed(joined["upload"], lambda number: bytes_of(pieces[number].piece), size)
            parts = partial(self._parts, pieces, size, joined["deltas"])
            upload = partial(_upload, http, f"/weights/{version}/pieces", named["rank"], size)
            for _ in uploads.map(upload, map(parts, together)):  # raises the first error, and begins no other request
                pass
            answer = _insist(http, "POST", f"/weights/{version}/loaded", json={"rank": named["rank"]})
        loaded = loaded_of(answer)
        if self._sent is not None:
            self._sent.loaded = loaded.version, loaded.digest
        return loaded

    def _parts(self, pieces: list[HeldPiece], size: int, deltas: bool, numbers: list[int]) -> Iterator[Part]:
        """Yields what is to be sent of these pieces, in order, in parts of at most `size` bytes."""
        for number in numbers:
            piece, values = pieces[number]
            _, _, data = as_bytes(str(piece), values)
            checksum = checksum_of_piece(piece, data)
            sent = whole_bodies(data, size) if self._sent is None else self._sent.bodies(piece, data, size, deltas)
            for body in sent:
                yield Part(number, checksum, body)

    def _base(self) -> dict:
        """Returns the field that names the base of deltas, if there is one. It is none any more: its copies change."""
        if self._sent is None or self._sent.loaded is None:
            return {}
        base, self._sent.loaded = self._sent.loaded, None
        return {"base": base}

    def update_weights_blocking(self, version: int, source: str) -> WeightsLoaded:
        """Loads a folder that all nodes of the service see. Raises WeightsRejected; the former weights then stay."""
        return loaded_of(self._call("POST", "/update_weights", {"weight_dir": source, "version": version}))

    def _call(self, method: str, path: str, body: dict | None = None) -> dict:
        """Returns the answer. Raises WeightsRejected or PermissionError with the service's reason, ConnectionError if
        none answers.
        """
        with httpx.Client(**self._gateway) as http:
            return _ask(http, method, path, json=body)


def _upload(http: httpx.Client, path: str, rank: int, size: int, parts: Iterator[Part]) -> None:
    """Uploads parts in order, small ones together."""
    for some in packed(parts, lambda part: len(part.body.data), size):
        query = [("rank", rank), *(field for part in some for field in part.query())]
        _insist(http, "POST", path, content=b"".join(part.body.data for part in some), headers=RAW, params=query)


def _insist(http: httpx.Client, *call, **request) -> dict:
    """The same for a call that may be made again: a connection that breaks ends no version."""
    for pause_s in AGAIN_S:
        with suppress(ConnectionError):
            return _ask(http, *call, **request)
        time.sleep(pause_s)
    return _ask(http, *call, **request)


def _ask(http: httpx.Client, method: str, path: str, **request) -> dict:
    """See `_call`. `request`: its body, and what httpx calls the rest."""
    until_s = time.monotonic() + FULL_S
    try:
        while (answer := http.request(method, path, **request)).status_code == 429 and time.monotonic() < until_s:
            time.sleep(FULL_PAUSE_S)
    except httpx.TransportError as error:
        raise ConnectionError(f"{http.base_url}: {one_line(error)}") from error
    if answer.is_success:
        return answer.json()
    if answer.status_code >= 500:
        raise ConnectionError(f"{http.base_url}: {path} is answered with status {answer.status_code}")
    refused = error_of_status(answer.status_code)
    raise (refused if refused is PermissionError else WeightsRejected)(answer.json()["error"]["message"])
