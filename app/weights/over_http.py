"""A trainer's weights, brought to a service by its gateway: HTTP for the calls, shared memory or a folder for tensors.

    weights = HttpWeights("http://trainer:TOKEN@127.0.0.1:8000")      # no Ray at the trainer
    weights.send_weights_blocking(weights.status_blocking().weights_version + 1, tailrace.saved_weights(model))

Invariant: an update that is refused or breaks off leaves the service under its former weights. Takes the place of a
`RolloutClient` for `AsyncWeights`, and for `MemoryTrainerEngine` over vLLM's `HTTPVLLMWeightSyncClient`.
"""

import json
from base64 import b64encode
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from tailrace.app.calls.refused import WeightsRejected, error_of_status
from tailrace.app.calls.staged_weights import StagedWeights, Tensors, staged_in
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.staging.slots import Slots

TIMEOUT_S = 900.0
"""Maximum seconds to wait for an answer: replicas may load for ten minutes."""


class ServedWeights(NamedTuple):
    """The present weights of a service, as its status names them."""

    weights_version: int
    weights_digest: str


class HttpWeights:
    """`address`: a gateway's address. If tokens are required, it holds a trainer's:
    `http://trainer:TOKEN@HOST:PORT`.
    """

    def __init__(self, address: str):
        parts = urlsplit(address)
        self._address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        token = f"{parts.username or ''}:{unquote(parts.password or '')}"
        self._headers = {"content-type": "application/json"}
        if parts.password:
            self._headers["authorization"] = f"Basic {b64encode(token.encode()).decode()}"

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
            source = staged.stage.seal()
        finally:
            staged.drop()  # keeps a sealed stage
        return self.update_weights_blocking(version, str(source)).model_copy(update={"staged_s": staged.seconds})

    def update_weights_blocking(self, version: int, source: str) -> WeightsLoaded:
        """Loads a folder that all nodes of the service see. Raises WeightsRejected; the former weights then stay."""
        self._call("POST", "/update_weights", {"weight_dir": source, "version": version})
        return WeightsLoaded(version=version, digest=self.status_blocking().weights_digest, replicas=())

    def _call(self, method: str, path: str, body: dict | None = None) -> dict:
        """Returns the answer. Raises WeightsRejected or PermissionError with the service's reason, OSError if none
        answers.
        """
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._address + path, data, self._headers, method=method)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except HTTPError as error:
            if error.code >= 500:
                raise
            reason = json.load(error)["error"]["message"]
            kind = error_of_status(error.code)
            raise (kind if kind is PermissionError else WeightsRejected)(reason) from None
