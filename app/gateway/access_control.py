"""Access control of the gateway, as ASGI middleware: bearer tokens with roles, and limits on bodies and open requests.

Invariant: a request that is refused here reaches no route. `scope["role"]` is the caller's. Below a trajectory's
address its own key is needed, or a token of the file; a key opens nothing else.
"""

import asyncio
import hmac
import json
import re
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tailrace.app.gateway.edge.errors import error_body, error_of
from tailrace.app.gateway.gateway_config import LOOPBACK, GatewayConfig
from tailrace.deployments.messages.roles import Role

OPEN_PATHS = ("/health", "/liveness")
"""Paths that need no token: load balancers call them."""

WATCHED = (*OPEN_PATHS, "/metrics")
WATCHERS = 16
"""Maximum number of requests for WATCHED that are open beyond `max_open`: a gateway that is full is not ill."""

TRAJECTORY = re.compile("/v1/trajectories/([^/]*)")
"""Address of a trajectory, and of all below it."""

OWN_NAME = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?")
"""Host and port of a site on loopback."""

PAGES = ("/board", "/board/stream", "/board/sample")
"""Pages for browsers, which ask a person for name and token, and then send them with each request."""


DRAINED_BYTES = 64 << 20
"""Maximum bytes of a body that are read and dropped beyond the limit. Many clients send all before they read: a
connection that is closed before takes their answer with it. An image in base64 has 32 MB.
"""

DRAIN_S = 10.0
"""Maximum seconds for that."""

ANYONE = "anyone"
"""In place of a token: the role of callers that give none. Trainers' clients of SGLang's dialect know no tokens."""


def read_tokens(path: Path) -> dict[str, Role]:
    """Reads roles by token, or by ANYONE. Raises ValueError, one line, if a line is not `ROLE TOKEN`."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        role, _, token = line.strip().partition(" ")
        if role not in set(Role) or (len(token.strip()) < 16 and token.strip() != ANYONE):
            names = ", ".join(Role)
            raise ValueError(
                f"{path}, line {number}: give `ROLE TOKEN`, a role of {names} and 16 characters or more, or {ANYONE}"
            )
        found[token.strip()] = Role(role)
    if not found:
        raise ValueError(f"{path}: there is no token in it; give lines of `ROLE TOKEN`")
    return found


def token_of(header: bytes) -> bytes:
    """Returns the token of `Bearer TOKEN`, or of `Basic`, which clients with an address `http://ROLE:TOKEN@HOST` send
    by themselves. Empty if there is none.
    """
    kind, _, given = header.partition(b" ")
    if kind.lower() == b"bearer":
        return given.strip()
    with suppress(ValueError):
        return b64decode(given, validate=True).partition(b":")[2] if kind.lower() == b"basic" else b""
    return b""


def needs_token(tokens: Mapping[str, Role] | None) -> bool:
    """Returns whether no caller has a role without a token. `tokens`: roles by token, or None without a file."""
    return tokens is not None and ANYONE not in tokens


class LimitedBody:
    """The body of a request, of which a route gets `limit` bytes at most."""

    def __init__(self, receive: Callable[[], Awaitable[dict]], limit: int):
        self._receive, self._left, self._has_ended = receive, limit, False

    @property
    def is_too_large(self) -> bool:
        """Whether more bytes than the limit have been read."""
        return self._left < 0

    async def receive(self) -> dict:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        self._has_ended = not message.get("more_body", False)  # also if the client has left
        return {"type": "http.disconnect"} if self.is_too_large else message  # which ends the reading

    async def drain(self) -> None:
        """Reads what is left and drops it, until DRAINED_BYTES or DRAIN_S are over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while not self._has_ended and self._left > -DRAINED_BYTES:
                    await self.receive()


class AccessControl:
    """ASGI middleware; see the module docstring. `is_key`: returns whether the trajectory of an id has this key."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        config: GatewayConfig,
        is_key: Callable[[str, bytes], Awaitable[bool]] | None = None,
    ):
        self._app, self._config, self._is_key = app, config, is_key
        self._tokens = None if config.tokens_file is None else read_tokens(Path(config.tokens_file))
        if ANYONE in (self._tokens or {}) and config.host not in LOOPBACK:
            raise ValueError(f"{config.tokens_file}: {ANYONE} is for loopback; host is {config.host}, open to others")
        self._open = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            role = await self._role(scope)
        except Exception as error:  # noqa: BLE001 - the coordinator knows keys: answered as a route's error
            body, status = error_of(error)
            await _refuse(send, status, body["error"]["message"])
            return
        if role is None:
            asks = (
                [(b"www-authenticate", b'Basic realm="tailrace: a name, and a token"')]
                if scope["path"] in PAGES
                else []
            )
            await _refuse(send, 401, self._needed(scope), asks)
        elif scope["method"] not in ("GET", "HEAD") and _is_foreign(scope, needs_token(self._tokens)):
            await _refuse(send, 403, "a page of another site sends this request")
        elif self._open >= self._config.max_open + (WATCHERS if scope["path"] in WATCHED else 0):
            await _refuse(send, 429, f"{self._open} requests are open, as many as the gateway takes; try again")
        else:
            scope["role"] = role
            self._open += 1
            try:
                await self._pass(scope, LimitedBody(receive, self._config.max_body_bytes), send)
            finally:
                self._open -= 1

    async def _role(self, scope) -> Role | None:
        below = TRAJECTORY.match(scope["path"])
        given = token_of(_header(scope, b"authorization"))
        if self._tokens is not None and scope["path"] in OPEN_PATHS:
            return Role.OBSERVER
        if self._tokens is None and below is None:
            return Role.EVALUATOR
        known = [role for token, role in (self._tokens or {}).items() if hmac.compare_digest(token.encode(), given)]
        if below is None and not known and not given:
            return self._tokens.get(ANYONE)
        if below is None or known:
            return known[0] if known else None
        key = given or _header(scope, b"x-api-key")
        return Role.EVALUATOR if key and await self._is_key(below[1], key) else None

    @staticmethod
    def _needed(scope) -> str:
        if TRAJECTORY.match(scope["path"]):
            return "give the key of a trajectory that has not ended: `Authorization: Bearer KEY` or `x-api-key: KEY`"
        return "give one of the gateway's tokens: `Authorization: Bearer TOKEN`"

    async def _pass(self, scope, body: LimitedBody, send) -> None:
        has_begun = False

        async def unless_too_large(message) -> None:
            nonlocal has_begun
            if not body.is_too_large:
                has_begun = True
                await send(message)

        if _length(scope) <= self._config.max_body_bytes:
            try:
                await self._app(scope, body.receive, unless_too_large)
            except Exception:  # a route's reading that was ended raises, too
                if not body.is_too_large:
                    raise
            if has_begun or not body.is_too_large:
                return
        await _refuse(send, 413, self._too_large(scope), [(b"connection", b"close")], body)

    def _too_large(self, scope) -> str:
        limit, length = self._config.max_body_bytes, _length(scope)
        given = f"{length:,}" if length > limit else f"more than {limit:,}"
        about = f"the body of {scope['path']} has {given} bytes, and max_body_bytes of the gateway is {limit:,}"
        return f"{about}: raise it in the gateway's args, or send less"


def _header(scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _is_foreign(scope, any_host: bool) -> bool:
    """Returns whether a browser sends it for a page of another site: a browser that knows a token adds it there,
    too. `any_host`: this site may have any name; else a page may have pointed its own one here.
    """
    origin = _header(scope, b"origin").partition(b"://")
    if not origin[0]:
        return False
    return origin[2] != _header(scope, b"host") or not (any_host or OWN_NAME.fullmatch(origin[2]))


def _length(scope) -> int:
    text = _header(scope, b"content-length")
    return int(text) if text.isdigit() else 0


async def _refuse(
    send, status: int, message: str, more: Sequence[tuple[bytes, bytes]] = (), unread: LimitedBody | None = None
) -> None:
    """Answers. `unread`: the request's body, if it is to be drained before the connection may close."""
    body = json.dumps(error_body(status, message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    headers += [(b"retry-after", b"1")] if status in (429, 503) else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": unread is not None})
    if unread is not None:
        await unread.drain()
        await send({"type": "http.response.body"})
