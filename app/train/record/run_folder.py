"""The folder of a run: configuration, ledger, checkpoints and rollouts."""

import fcntl
import json
import os
from pathlib import Path

from tailrace.app.errors import BadInput
from tailrace.app.files.figures import PICTURE
from tailrace.app.files.output_file import OutputFile, output_folder
from tailrace.app.strict_json import parse_object
from tailrace.app.train.record.accuracy import Accuracy
from tailrace.app.train.record.ledger import LedgerRow
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.sent_weights import SentWeights
from tailrace.app.train.train_config import MAY_CHANGE, TrainConfig

CONFIG, PICTURE_NAME, LOCK = "config.json", "curve.png", "run.lock"
LATER_KEYS = {"order": "shuffle"}
"""Keys that runs of earlier versions do not have, with the value that they ran with."""

ROWS = "ledger.jsonl", "held_out.jsonl", "weights.jsonl"
FOLDERS = "checkpoints", "rollouts"


class RunFolder:
    """Created if absent, and locked until this process ends. Raises BadInput if it holds a run of another
    configuration, or other files under the same names, or if another process has it.

    `plot`: whether the run will have a picture.
    """

    def __init__(self, path: Path, config: TrainConfig, plot: bool = False):
        self.path = Path(path).resolve()
        self.checkpoints, self.rollouts = (self.path / name for name in FOLDERS)
        output_folder(self.path, "--out")
        try:
            if not (self.path / CONFIG).exists():
                self._refuse_others()
            wanted = config.model_dump(mode="json")
            self._check(wanted)
            self._lock()
            self._keep(wanted)
            self.picture = OutputFile(self.path / PICTURE_NAME, "--out", PICTURE) if plot else None
            for folder in (self.checkpoints, self.rollouts):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise BadInput(f"--out {path}: cannot be written: {error.strerror}") from error
        self.ledger = RowFile(self.path / ROWS[0], LedgerRow)
        self.accuracies = RowFile(self.path / ROWS[1], Accuracy)
        self.sent = RowFile(self.path / ROWS[2], SentWeights)

    def _refuse_others(self) -> None:
        """Refuses a folder with files of other origin: without a configuration there is no run here, so no file is
        ours.
        """
        for name in (*ROWS, PICTURE_NAME, *FOLDERS):
            place = self.path / name
            empty = place.is_dir() and name in FOLDERS and not any(place.iterdir())
            if place.exists() and not empty:
                raise BadInput(f"--out {self.path}: {name} is there and is of no run of ours; give another folder")

    def _lock(self) -> None:
        """Locks the folder for this process. Its children do not hold the lock, as they would one of `flock`, so none
        that outlives a killed run keeps the next one out.
        """
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # never closed: the process's end unlocks
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(lock)
            raise BadInput(f"--out {self.path}: another run writes it now; wait for its end or give another") from error

    def _check(self, wanted: dict) -> None:
        file = self.path / CONFIG
        if file.exists():
            try:
                before = LATER_KEYS | parse_object(file.read_bytes())
            except ValueError as error:
                raise BadInput(f"{file}: not the configuration of a run: {error}; give another folder") from error
            if missing := wanted.keys() - before.keys() - set(MAY_CHANGE):
                raise BadInput(f"{file}: not the configuration of a run: no {min(missing)}; give another folder")
            for key in wanted.keys() - set(MAY_CHANGE):
                if before.get(key) != wanted[key]:
                    raise BadInput(
                        f"--out {self.path}: it holds a run with {key}: {before.get(key)!r}, not {wanted[key]!r}; "
                        "give another folder"
                    )

    def _keep(self, wanted: dict) -> None:
        file = self.path / CONFIG
        part = file.with_suffix(".part")
        part.write_text(json.dumps(wanted, indent=2) + "\n")
        part.replace(file)

    def resume(self) -> tuple[int, Path | None]:
        """Drops the rows of what is done again: those after the last checkpoint, or all if there is none. Returns the
        checkpoint's step, 0 without one, and its folder.
        """
        begun, checkpoint = self.last_checkpoint() or (0, None)
        for file in (self.ledger, self.accuracies, self.sent):
            file.truncate_after(-1 if checkpoint is None else begun)
        return begun, checkpoint

    def last_checkpoint(self) -> tuple[int, Path] | None:
        """Returns the step and folder of the newest whole checkpoint, or None. The trainer's state is written last."""
        found = [
            (int(path.name.rpartition("-")[2]), path)
            for path in self.checkpoints.glob("checkpoint-*")
            if (path / "trainer_state.json").exists()
        ]
        return max(found, default=None)
