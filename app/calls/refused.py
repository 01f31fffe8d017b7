"""Errors of a client: a refused request, a broken stream. Raised by `app.calls.client` and its calls."""


class RolloutRejected(ValueError):
    """The service refused the batch. The text names the fault and the remedy."""


class QuotaExceeded(RolloutRejected):
    """The batch is beyond a quota of the service. The text names it, and the batch to wait for, if any."""


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
