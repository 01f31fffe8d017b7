"""One of several processes of a trainer, started by `test_processes.py` with torchrun's variables.

Arguments: a model folder, a folder for outputs, and the kind of service. Writes what it trained on to RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from live.trainers.stand_in import StandIn
from live.trainers.test_attach import logged, trainer_of, weights

from tailrace import attach
from tailrace.app.train.record.checksum import weights_checksum


class Refusing(StandIn):
    """Takes no weights."""

    def send_weights_blocking(self, version, tensors):
        next(iter(tensors))
        raise ValueError("these weights are refused")


SERVICES = {"whole": StandIn, "refusing": Refusing}


def main(model: Path, out: Path, service: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    stand_in = SERVICES[service](model)
    trainer = trainer_of(model, out / str(rank), max_steps=2)
    assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    attach(trainer, stand_in)
    trainer.train()
    found = {
        "updates": stand_in.updates,
        "groups": [[group.samples for group in batch.groups] for batch in stand_in.batches],
        "ratio": logged(trainer, "sampling/importance_sampling_ratio/mean"),
        "difference": logged(trainer, "sampling/sampling_logp_difference/max"),
        "trained": weights_checksum(trainer.accelerator.unwrap_model(trainer.model)),
        "tensors": len(weights(trainer)),
    }
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
