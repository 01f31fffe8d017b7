"""A driver that trains in a separate process, so that it can be killed.

Called by `runs`. The process starts afresh, as a command would, and connects to the running service.
"""

import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from tailrace.app.errors import Failed
from tailrace.app.train.record.ledger import LedgerRow
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.run_folder import RunFolder
from tailrace.app.train.train_config import TrainConfig

LOOK_S = 0.2
"""Seconds between two reads of the ledger of a driver that is to be killed."""


class TrainingDriver:
    """`folder`: folder of the run. `address`: address of the cluster. `backwards`: adds gradients in the reverse of the
    fixed order. `was_killed`: whether the last run was killed before its end.
    """

    def __init__(self, config: TrainConfig, folder: Path, address: str, backwards: bool = False):
        self._arguments = config.model_dump_json(), str(folder), address, backwards
        self._ledger, self.was_killed = folder / "ledger.jsonl", False

    def run(self, kill_after: int | None = None) -> list[LedgerRow]:
        """Trains to the end, or until `kill_after` steps are in the ledger: the driver is killed then. Returns the
        ledger's rows. Raises Failed if the driver fails by itself.
        """
        process = get_context("spawn").Process(target=_train, args=self._arguments, name="trainer")
        process.start()
        while process.is_alive() and (kill_after is None or len(self._rows()) < kill_after):
            time.sleep(LOOK_S)
        self.was_killed = process.is_alive()
        if self.was_killed:
            process.kill()
        process.join()
        if process.exitcode and not self.was_killed:
            raise Failed(f"the trainer ended with exit code {process.exitcode}; its last lines are above")
        return self._rows()

    def _rows(self) -> list[LedgerRow]:
        return RowFile(self._ledger, LedgerRow).rows


def backward_order(question_ids: Sequence[str], longest: dict[str, int]) -> tuple[int, ...]:
    """Returns the reverse of `by_expected_length`."""
    from tailrace.app.train.gradients.gradient_order import by_expected_length

    return tuple(reversed(by_expected_length(question_ids, longest)))


def _train(config: str, folder: str, address: str, backwards: bool) -> None:
    from tailrace.app.cluster import connect

    client = connect(address)
    from tailrace.app.train.gradients.gradient_order import by_expected_length
    from tailrace.app.train.run import train  # it loads torch and TRL, which come after the connection to Ray
    from tailrace.app.train.task import read_task

    settings = TrainConfig.model_validate_json(config)
    order = backward_order if backwards else by_expected_length
    say = lambda text: print(f"  {text}", file=sys.stderr, flush=True)  # noqa: E731
    train(client, settings, read_task(settings.task), RunFolder(Path(folder), settings), say, order)
