"""The folder of a run: configuration, ledger, checkpoints and rollouts."""

import json
from pathlib import Path

from tailrace.app.errors import BadInput
from tailrace.app.train.config import MAY_CHANGE, TrainConfig
from tailrace.app.train.record.accuracy import Accuracy
from tailrace.app.train.record.ledger import LedgerRow
from tailrace.app.train.record.row_file import RowFile
from tailrace.app.train.record.sent_weights import SentWeights


class RunFolder:
    """Made where absent. Raises BadInput if it holds a run of another configuration."""

    def __init__(self, path: Path, config: TrainConfig):
        self.path = Path(path).resolve()
        self.picture = self.path / "curve.png"
        self.checkpoints, self.rollouts = self.path / "checkpoints", self.path / "rollouts"
        try:
            for folder in (self.checkpoints, self.rollouts):
                folder.mkdir(parents=True, exist_ok=True)
            self._keep(config)
        except OSError as error:
            raise BadInput(f"--out {path}: cannot be written: {error.strerror}") from error
        self.ledger = RowFile(self.path / "ledger.jsonl", LedgerRow)
        self.accuracies = RowFile(self.path / "held_out.jsonl", Accuracy)
        self.sent = RowFile(self.path / "weights.jsonl", SentWeights)

    def _keep(self, config: TrainConfig) -> None:
        file = self.path / "config.json"
        wanted = config.model_dump(mode="json")
        if file.exists():
            before = json.loads(file.read_text())
            for key in wanted.keys() - set(MAY_CHANGE):
                if before.get(key) != wanted[key]:
                    raise BadInput(
                        f"--out {self.path}: it holds a run with {key}: {before.get(key)!r}, not {wanted[key]!r}; "
                        "give another folder"
                    )
        file.write_text(json.dumps(wanted, indent=2) + "\n")

    def last_checkpoint(self) -> tuple[int, Path] | None:
        """The step and folder of the newest whole checkpoint, or None. The trainer's state is written last."""
        found = [
            (int(path.name.rpartition("-")[2]), path)
            for path in self.checkpoints.glob("checkpoint-*")
            if (path / "trainer_state.json").exists()
        ]
        return max(found, default=None)
