"""A client's connection to the coordinator: the application's handle, and the role that every call names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.app.calls.refused import accepted
from tailrace.app.calls.resume import Interrupted, Retries, interrupted_by_loss
from tailrace.deployments.messages.roles import Role


class Connection:
    """`resume_s`: seconds for which a call waits for a lost coordinator."""

    def __init__(self, handle, role: Role, resume_s: float):
        self.role = role
        self._handle, self._streams, self._resume_s = handle, handle.options(stream=True), resume_s

    def retries(self) -> Retries:
        """Returns the limit for repetitions of one more call."""
        return Retries(self._resume_s)

    def send(self, method: str, *arguments):
        """Starts a call once. Returns Serve's response, which may be awaited or cancelled; its answer may be a
        refusal.
        """
        return getattr(self._handle, method).remote(self.role, *arguments)

    async def ask(self, method: str, *arguments):
        """Returns the answer of a call, which is repeated while the coordinator is lost: it has to be one that may be.

        Raises the error of a refusal, and Ray's error once `resume_s` have passed.
        """
        retries = self.retries()
        while True:
            try:
                with interrupted_by_loss():
                    answer = await self.send(method, *arguments)
                return accepted(answer, method)
            except Interrupted as lost:
                await retries.wait(lost)

    @asynccontextmanager
    async def stream(self, method: str, *arguments) -> AsyncIterator[AsyncIterator]:
        """Opens a stream, whose items may be refusals. Its end here is its end there, too."""
        items = getattr(self._streams, method).remote(self.role, *arguments)
        try:
            yield items
        finally:
            items.cancel()  # else it would run to its end without a reader, and the coordinator would end after it
