"""The weights of one engine, and their exchange for others. Owned by the stepper.

Invariant: a source that does not fit, or that holds another content than is meant, changes nothing.
"""

from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.vllm_exact.weight_loading import called, weights_digest


class LoadedWeights:
    """`engine`: vLLM's LLMEngine, with our workers, as it was started. `version`: the name of these weights."""

    def __init__(self, engine, version: int):
        self._engine, self.version, self.source = engine, version, ""
        self.digest = weights_digest(engine.vllm_config.model_config.model)

    def report(self) -> dict:
        """Returns their fields of EngineStats."""
        return {"weights_version": self.version, "weights_source": self.source, "weights_digest": self.digest}

    def unlike(self, chunk: ChunkRequest) -> str | None:
        """Returns the reason why a chunk is for other weights, or None."""
        if chunk.weights_version != self.version:
            return f"wants weights version {chunk.weights_version}, this is {self.version}"
        if chunk.weights_digest not in ("", self.digest):
            return f"wants weights {chunk.weights_digest}, this is {self.digest}"
        return None

    def refusal(self, source: str) -> str | None:
        """Returns the reason, in one line, why a source's weights cannot be loaded, or None. Every rank checks."""
        reasons = self._engine.collective_rpc("weights_refusal", args=(source,))
        return next((reason for reason in reasons if reason is not None), None)

    def load(self, version: int, source: str, digest: str) -> None:
        """Puts the safetensors of a source into the running model. No chunk runs meanwhile.

        `digest`: of the content that is meant; empty for any. Raises ValueError, one line; nothing has changed then.
        KV is kept: its keys carry version and digest. Any other error leaves the model half loaded.
        """
        if (reason := self.refusal(source)) is not None:
            raise ValueError(reason)
        if digest not in ("", found := weights_digest(source)):
            raise ValueError(f"{called(source)}: holds other weights ({found}) than version {version} ({digest})")
        self._engine.collective_rpc("load_weights_from", args=(source,))
        self._engine.engine_core.engine_core.reset_encoder_cache()  # embeddings of images under the former weights
        if weights_digest(source) != found:
            raise RuntimeError(f"{called(source)}: it was written to while it was loaded")
        self.version, self.source, self.digest = version, source, found
