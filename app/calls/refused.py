"""Refusals: the errors that a client raises, and one table for each form in which the service sends them.

The coordinator answers a refused call with `Rejected`, the gateway with an HTTP status. Used by both clients and by the
gateway.
"""

from typing import TypeVar

from tailrace.deployments.messages.rollout import Rejected, RejectedBy

Answer = TypeVar("Answer")


class RolloutRejected(ValueError):
    """The service refused the batch. The text names the fault and the remedy."""


class QuotaExceeded(RolloutRejected):
    """The batch is beyond a quota of the service. The text names it, and the batch to wait for, if any."""


class FeatureDataMissing(RolloutRejected):
    """An image, video or sound was sent without its data, and the service has none of it."""


class UnknownAdapter(RolloutRejected):
    """A request names an adapter that is not loaded."""


class AdapterRejected(ValueError):
    """The adapter was not loaded, or not unloaded. The text says why."""


class TooLargeForQuota(RolloutRejected):
    """The batch or request exceeds a quota of the service by itself: repeating it is no use. The text names it."""


class WeightsRejected(ValueError):
    """The weights were not updated. The text says why."""


class PoliciesRejected(ValueError):
    """The policies were not switched. The text says why."""


class StreamBroken(ConnectionError):
    """A stream cannot continue after the tokens that it has yielded."""


BY_CAUSE: dict[RejectedBy, type[Exception]] = {
    RejectedBy.ROLE: PermissionError,
    RejectedBy.CONTENT: RolloutRejected,
    RejectedBy.WEIGHTS: RolloutRejected,
    RejectedBy.READER: RolloutRejected,
    RejectedBy.ADAPTER: UnknownAdapter,
    RejectedBy.QUOTA: QuotaExceeded,
    RejectedBy.SIZE: TooLargeForQuota,
    RejectedBy.DATA: FeatureDataMissing,
}
"""Error of a refusal by its cause."""

BY_CALL: dict[str, type[Exception]] = {
    "update_weights": WeightsRejected,
    "publish_weights": WeightsRejected,
    "load_adapter": AdapterRejected,
    "unload_adapter": AdapterRejected,
    "set_policies": PoliciesRejected,
    "resume": ValueError,
    "sleep": ValueError,
    "wake_up": ValueError,
    "read_weights": ValueError,
    "transfer_weights": ValueError,
}
"""Error of these calls of the coordinator for every cause but the role."""

STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (UnknownAdapter, 404),
    (QuotaExceeded, 429),
    (PermissionError, 403),
    (PermissionError, 401),
    (ValueError, 400),
)
"""HTTP status of each error. The gateway answers with the first one that fits, and its client raises its error."""


def error_of(refusal: Rejected, call: str) -> Exception:
    """Returns the error for a refusal of the coordinator's method `call`."""
    kind = BY_CAUSE[refusal.by]
    return (kind if refusal.by is RejectedBy.ROLE else BY_CALL.get(call, kind))(refusal.reason)


def accepted(answer: Answer | Rejected, call: str) -> Answer:
    """Returns an answer of the coordinator's method `call`. Raises its error if it is a refusal."""
    if isinstance(answer, Rejected):
        raise error_of(answer, call)
    return answer


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status of an error, or None if it is no refusal."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), None)


def error_of_status(status: int) -> type[Exception]:
    """Returns the kind of error of an HTTP status: RolloutRejected for 400, and for any that the table lacks."""
    kind = next((kind for kind, known in STATUSES if known == status), ValueError)
    return RolloutRejected if kind is ValueError else kind
