"""The commands to an engine, besides chunks: one message of one of these types from the coordinator to the engine.

Sent by `EngineClient.ask`, taken by the replica's `obey`, done by `EngineLoop` between two steps. Each says what the
answer is. An answer that is an error is one line.
"""

from dataclasses import dataclass

from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.transfer import Transfer


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Put the weights of a source into the running model, as `version`, after the chunks in flight.

    `digest`: of the content that is meant; empty for any. A load of the present weights changes nothing. Chunks that
    come before it end under the old version. Those that come after it wait for it, and are then checked against the
    version that holds. ValueError if the source does not fit: the old weights stay. EngineDown if the engine stops
    first. A failure half-way ends the engine. Takes seconds, in which the snapshot is the one from before.
    """

    version: int
    source: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class CheckWeights:
    """Give the digest of the weights of a source. ValueError if they cannot be loaded. Changes nothing."""

    source: str


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Give a `WeightsRead`: the weights as they are computed with. Takes seconds, in which no step ends."""


@dataclass(frozen=True, slots=True)
class TransferWeights:
    """Take one phase of a transfer by vLLM's engines. Give the source that was staged, or an empty text."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class FallAsleep:
    """Give back the memory of weights and KV, after the chunks in flight. `LoadWeights` brings the weights back,
    `WakeKv` the KV, whose content is lost. ValueError if the weights could not come back."""


@dataclass(frozen=True, slots=True)
class WakeKv:
    """Have the memory of the KV back."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load the adapter in a folder. Give its digest; AdapterRefused if it cannot be loaded."""

    path: str


@dataclass(frozen=True, slots=True)
class NameAdapter:
    """Record the version that an adapter's name refers to, unless a newer one is known."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class ForgetAdapter:
    """Forget an adapter's name; chunks that run with its content continue."""

    name: str


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Drop the KV of chunks that have ended. Give False, and drop nothing, while chunks run."""


@dataclass(frozen=True, slots=True)
class RejoinPool:
    """Continue with the pool's master at another address. RuntimeError if it does not answer."""

    master_address: str


@dataclass(frozen=True, slots=True)
class Peek:
    """Give the tokens, int32, that a chunk has made so far, once the present step has ended."""

    chunk_id: str


@dataclass(frozen=True, slots=True)
class TakeSpans:
    """Give the spans of a trace that is kept (its id, or a traceparent in it), see `Telemetry.take`."""

    trace_id: str


Command = (
    LoadWeights | CheckWeights | ReadWeights | TransferWeights | FallAsleep | WakeKv | LoadAdapter | NameAdapter
    | ForgetAdapter | ResetCache | RejoinPool | Peek | TakeSpans
)  # fmt: skip
