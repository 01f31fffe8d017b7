"""Ray's token mode, without which any process that reaches a port of Ray can run code on its nodes.

Invariant: a service refuses to start if the mode is off, unless its configuration allows it. Checked by `app.build`,
for an early error, and by the coordinator, whose process has the cluster's own mode and not a driver's.
"""

from ray._private.authentication.authentication_utils import is_token_auth_enabled


class TokenModeOff(RuntimeError):
    """The service does not start. The text is one line with the remedy."""


def require_token_mode(allow_no_token: bool) -> None:
    """Raises TokenModeOff if this process's Ray takes calls without a token."""
    if not allow_no_token and not is_token_auth_enabled():
        mend = "start Ray and its drivers with RAY_AUTH_MODE=token, or set args.allow_no_token: true"
        raise TokenModeOff(
            f"Ray's token mode is off: any process that reaches its ports can run code on its nodes; {mend}"
        )
