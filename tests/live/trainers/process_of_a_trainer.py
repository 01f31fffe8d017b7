"""One of several processes of a trainer, started by `test_processes.py` with torchrun's variables.

Arguments: a model folder, and a folder for outputs. The service takes the weights of the first step alone, so training
ends with an error at the second. Writes what it trained on until then to RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from live.trainers.stand_in import StandIn
from live.trainers.test_attach import logged, trainer_of

from tailrace import attach
from tailrace.app.train.record.checksum import weights_checksum


class Refusing(StandIn):
    """Takes weights once."""

    def send_weights_blocking(self, version, tensors):
        if version > 1:
            next(iter(tensors))
            raise ValueError("these weights are refused")
        return super().send_weights_blocking(version, tensors)


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    service = Refusing(model)
    trainer = trainer_of(model, out / str(rank), max_steps=2)
    assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    attach(trainer, service)
    try:
        trainer.train()
    finally:
        found = {
            "updates": service.updates,
            "groups": [[group.samples for group in batch.groups] for batch in service.batches],
            "ratio": logged(trainer, "sampling/importance_sampling_ratio/mean"),
            "difference": logged(trainer, "sampling/sampling_logp_difference/max"),
            "trained": weights_checksum(trainer.accelerator.unwrap_model(trainer.model)),
        }
        (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
