"""The progress of a rollout: a bar on a terminal, a line every few seconds elsewhere. Always on stderr."""

import asyncio
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.status import ServiceSnapshot

POLL_S = 0.5
LINE_S = 5.0


class RolloutProgress:
    """Follows one batch through `client.status()` while the driver reads its groups."""

    def __init__(self, client: RolloutClient, batch_id: str, samples: int):
        self._client, self._batch_id = client, batch_id
        self._console = Console(stderr=True)
        self._last = (time.monotonic(), 0)
        self._rate = 0.0
        self._printed_at = 0.0
        text = TextColumn("{task.description}")
        columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal, transient=True)
        self._task = self._bar.add_task("starting", total=samples)

    async def follow(self) -> None:
        """Follows the batch until cancelled."""
        with self._bar:
            while True:
                self._show(await self._client.status())
                await asyncio.sleep(POLL_S)

    def _show(self, status: ServiceSnapshot) -> None:
        batch = next((b for b in status.batches if b.batch_id == self._batch_id), None)
        if batch is None:
            return
        now, (then, tokens) = time.monotonic(), self._last
        if now > then:
            self._rate += 0.5 * ((batch.tokens - tokens) / (now - then) - self._rate)
        self._last = (now, batch.tokens)
        text = status.waits_for and f"waits for {status.waits_for}"
        text = text or (
            f"{self._rate:.0f} tokens/s, {status.running} running, {status.waiting} waiting"
            + (", in the tail" if batch.tail else "")
        )
        self._bar.update(self._task, completed=batch.ended, description=text)
        if not self._console.is_terminal and now - self._printed_at >= LINE_S:
            self._printed_at = now
            self._console.print(f"{batch.ended}/{batch.samples} samples, {text}", highlight=False)
