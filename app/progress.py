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
        self._client, self._batch_id, self._samples = client, batch_id, samples
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
        batches = [b for b in status.batches if b.batch_id == self._batch_id]
        if not batches:
            return
        now, made, (then, tokens) = time.monotonic(), sum(b.tokens for b in batches), self._last
        if now > then:  # a new coordinator counts from 0 again, and has only the groups that are still to come
            self._rate += 0.5 * (max(0, made - tokens) / (now - then) - self._rate)
        self._last = (now, made)
        ended = self._samples - sum(b.samples - b.ended for b in batches)
        text = status.waits_for and f"waits for {status.waits_for}"
        text = text or (
            f"{self._rate:.0f} tokens/s, {status.running} running, {status.waiting} waiting"
            + (", in the tail" if all(b.tail for b in batches) else "")
        )
        self._bar.update(self._task, completed=ended, description=text)
        if not self._console.is_terminal and now - self._printed_at >= LINE_S:
            self._printed_at = now
            self._console.print(f"{ended}/{self._samples} samples, {text}", highlight=False)
