"""A client's connection to one gateway: requests in JSON, repeated while the service is unreachable or full."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from tailrace.app.calls.resume import Interrupted, Retries
from tailrace.app.http.connections import Connections
from tailrace.app.http.refused import LOST, error_of, lost

Answer = TypeVar("Answer")


class GatewayConnection:
    """`url`: the gateway's address. `resume_s`: seconds for which a call is repeated."""

    def __init__(self, url: str, connections: Connections, resume_s: float):
        self._url, self._connections, self._resume_s = url, connections, resume_s

    def close(self) -> None:
        """Closes all sockets, and with them the requests on them."""
        self._connections.close()

    async def repeated(self, call: Callable[..., Awaitable[Answer]], *arguments) -> Answer:
        """Returns the result of a call, which is repeated while it raises Interrupted."""
        retries = Retries(self._resume_s)
        while True:
            try:
                return await call(*arguments)
            except Interrupted as broken:
                await retries.wait(broken)

    async def ask(self, method: str, path: str, body: dict | None = None) -> dict:
        """Returns the JSON of an answer, however often that has to be requested. Raises as `once` does."""
        return await self.repeated(self.once, method, path, body)

    async def tell(self, path: str, body: dict) -> None:
        """Sends a request whose answer is a text, however often that takes. Raises as `once` does."""
        await self.repeated(self._answer, "POST", path, body, {})

    async def once(self, method: str, path: str, body: dict | None, headers: dict[str, bytes] | None = None) -> dict:
        """Returns the JSON of an answer. Raises the error of a refusal, Interrupted if the request may be repeated."""
        answer = await self._answer(method, path, body, headers or {})
        try:
            return answer.json()
        except ValueError as error:
            raise ValueError(f"{answer.url}: the answer is not of a gateway of Tailrace") from error

    async def _answer(self, method: str, path: str, body: dict | None, headers: dict[str, bytes]) -> httpx.Response:
        try:
            answer = await self._connections.ask(method, path, body, headers)
        except LOST as error:
            raise lost(self._url, error) from error
        if not answer.is_success:
            raise error_of(answer)
        return answer
