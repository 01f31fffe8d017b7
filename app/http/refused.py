"""Answers of a gateway other than 200, as the errors that `RolloutClient` raises.

Invariant: a call is repeated only if that may help (429, 503, a lost connection, a proxy's own page).
"""

import httpx

from tailrace.app.calls.refused import QuotaExceeded, RolloutRejected, TooLargeForQuota, error_of_status
from tailrace.app.calls.resume import Interrupted

MAX_RETRY_AFTER_S = 60.0
"""Maximum pause, in seconds, that an answer may request."""

NO_GATEWAY_S = 60.0
"""Seconds for which answers in another format than a gateway's are tolerated: Serve may be starting one."""

SAMPLE_FAILED = "SampleFailed"
"""Type of the error 400 for a sample that no engine can run: by itself, whatever else its batch has."""

LOST = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ProxyError)
"""Errors of a connection. Other errors of httpx concern the request, and would recur."""


class BeyondContext(RolloutRejected):
    """The maximum length of an answer is greater than the model's context. Over Ray it would be cut."""


class GivenUp(RuntimeError):
    """The service has given up a sample of the request. The text gives the reason."""


def lost(url: str, error: httpx.TransportError) -> Interrupted:
    """Returns the error of a connection that broke, or that could not be made."""
    return Interrupted(ConnectionError(f"{url}: {error or type(error).__name__}"))


def error_of(answer: httpx.Response) -> Exception:
    """Returns the error to raise for an answer."""
    status, reason = answer.status_code, _reason(answer)
    if reason is None:
        text = f"{answer.url}: {status} {answer.reason_phrase}, which is not a gateway's answer"
        return Interrupted(ConnectionError(text), NO_GATEWAY_S, _pause_s(answer))
    if status == 503:
        return Interrupted(ConnectionError(reason), pause_s=_pause_s(answer))
    kind = answer.json()["error"].get("type")
    if status == 500 or kind == SAMPLE_FAILED:
        return GivenUp(reason)
    if kind == TooLargeForQuota.__name__:
        return TooLargeForQuota(reason)
    if status == 400 and answer.json()["error"].get("param") == "max_tokens":
        return BeyondContext(reason)
    error = error_of_status(status)(reason)
    return Interrupted(error, pause_s=_pause_s(answer)) if isinstance(error, QuotaExceeded) else error


def _reason(answer: httpx.Response) -> str | None:
    """Returns the message of a gateway's error, or None if another server has made it."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _pause_s(answer: httpx.Response) -> float:
    """Returns the seconds in the header Retry-After; 0 if it has none, or a date."""
    text = answer.headers.get("retry-after", "")
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdecimal() else 0.0
