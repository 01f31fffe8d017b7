"""The weights of one engine: their name, their loads, and whether they are in memory.

Invariant: an engine that sleeps runs no chunk, and its weights come back only by a load, whose content is checked
against the digest. Owned by the stepper, and called on its thread.
"""

from typing import Any

from tailrace.deployments.engine.engine_steps import Steps
from tailrace.deployments.engine.weights_score import score_of
from tailrace.deployments.messages.chunk import KV_CACHE, WEIGHTS, ChunkRequest, WeightsRead
from tailrace.deployments.messages.scores import Score, apart
from tailrace.deployments.messages.transfer import Transfer
from tailrace.deployments.vllm_exact.weight_loading import called, weights_digest


class EngineWeights:
    """`engine`: vLLM's LLMEngine. `version`: version of the weights that it was started on."""

    def __init__(self, engine, version: int):
        self._engine, self._folder = engine, engine.vllm_config.model_config.model
        self.version, self._source, self._digest = version, "", weights_digest(self._folder)
        self.asleep: tuple[str, ...] = ()  # parts of memory that are given back
        self._score: Score = ()
        self._drift = 0.0

    def report(self) -> dict:
        """Returns the fields of EngineStats about weights."""
        named = {"weights_version": self.version, "weights_source": self._source, "weights_digest": self._digest}
        return named | {"asleep": self.asleep, "score": self._score, "score_drift": self._drift}

    def score(self, steps: Steps) -> None:
        """Scores the weights, unless a part of the memory sleeps; no chunk may run."""
        self._score = () if self.asleep else score_of(steps)

    def score_again(self, steps: Steps) -> None:
        """Compares the weights with those that were loaded, before others replace them; no chunk may run."""
        self._drift = apart(self._score, score_of(steps)) if self._score and not self.asleep else 0.0

    def chunk_refusal(self, chunk: ChunkRequest) -> str | None:
        """Returns why a chunk cannot run under these weights, or None."""
        if self.asleep:
            return "this engine sleeps"
        if chunk.weights_version != self.version:
            return f"wants weights version {chunk.weights_version}, this is {self.version}"
        if chunk.weights_digest not in ("", self._digest):
            return f"wants weights {ascii(chunk.weights_digest)[1:-1]}, this is {self._digest}"
        return None

    def refusal(self, source: str) -> str | None:
        """Returns in one line why this folder's weights cannot be loaded, or None. Every rank checks."""
        reasons = self._engine.collective_rpc("weights_refusal", args=(source,))
        return next((reason for reason in reasons if reason is not None), None)

    def load(self, version: int, source: str, digest: str) -> None:
        """Loads the safetensors of a source into the running model. No chunk runs meanwhile.

        `digest`: the intended content's digest; empty for any. An empty source names the folder that the engine was
        started on. Raises ValueError, one line; nothing has changed then. KV is kept: its keys carry version and
        digest. Any other error leaves the model half loaded.
        """
        folder = source or self._folder
        if (reason := self.refusal(folder)) is not None:
            raise ValueError(reason)
        if digest not in ("", found := weights_digest(folder)):
            raise ValueError(f"{called(folder)}: holds other weights ({found}) than version {version} ({digest})")
        self._wake(WEIGHTS)
        try:
            self._engine.collective_rpc("load_weights_from", args=(folder,))
            self._engine.engine_core.engine_core.reset_encoder_cache()  # embeddings of images under the former weights
            if weights_digest(folder) != found:
                raise RuntimeError(f"{called(folder)}: it was written to while it was loaded")
        except ValueError as error:  # a refusal would say that nothing has changed
            raise RuntimeError(f"{called(folder)}: its load broke off: {error}") from error
        self.version, self._source, self._digest = version, source, found

    def fall_asleep(self) -> None:
        """Gives back the memory of weights and KV. Raises ValueError, one line, if they could not come back."""
        if WEIGHTS in self.asleep:
            return
        folder = self._source or self._folder
        if (reason := self.refusal(folder)) is not None:
            raise ValueError(f"{reason}; the weights could not come back")
        if (found := weights_digest(folder)) != self._digest:
            changed = f"{called(folder)}: holds other weights now ({found}) than run ({self._digest})"
            raise ValueError(f"{changed}, which could not come back; send them first")
        self._attempt("fall_asleep")
        self.asleep = WEIGHTS, KV_CACHE

    def wake_kv(self) -> None:
        """Allocates the memory of the KV again. Raises ValueError, one line, if another process has it."""
        self._wake(KV_CACHE)

    def _wake(self, tag: str) -> None:
        if tag in self.asleep:
            self._attempt("wake", tag)
            self.asleep = tuple(other for other in self.asleep if other != tag)

    def read_back(self) -> WeightsRead:
        """Reads back the weights that the engine computes with. Raises ValueError, one line."""
        if WEIGHTS in self.asleep:
            raise ValueError("the engine sleeps; wake it up first")
        folder = self._source or self._folder
        unlike: tuple[str, ...] | None = None
        problem = ""
        if weights_digest(folder) == self._digest:
            found = self._attempt("unlike_weights", folder)
            unlike = None if found is None else tuple(found)
            problem = "" if found is not None else "quantized weights have other values than their source"
        else:
            problem = f"{called(folder)}: holds other weights now"
        checksums = self._attempt("weight_checksums")
        return WeightsRead(self.version, self._digest, checksums, unlike, problem)

    def transfer(self, transfer: Transfer) -> str:
        """Runs one phase of a transfer on every rank. Returns the source that was staged, or an empty text. Raises
        ValueError, one line.
        """
        return self._attempt("transfer_weights", transfer)

    def _attempt(self, method: str, *args) -> Any:
        """Calls a worker method by `ExactWorker.attempt`. Returns the first rank's answer. Raises ValueError if a rank
        refuses.
        """
        answers = self._engine.collective_rpc("attempt", args=(method, *args))
        for _, reason in answers:
            if reason is not None:
                raise ValueError(reason)
        return answers[0][0]
