"""One of several processes of a trainer of a mixture of experts, started by `test_trl_routes.py`.

Arguments: a model folder, and a folder for outputs. Writes the greatest distance of its losses' logprobs from the
rollout's, and the greatest of all processes' old logprobs, to RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from live.trainers.stand_in_experts import OtherExperts
from live.trainers.test_attach import logged, trainer_of
from live.trainers.watched_trainer import WatchedTrainer

from tailrace import attach


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    settings = {"max_steps": 1, "gradient_checkpointing": True, "per_device_train_batch_size": 4}
    trainer = trainer_of(model, out / rank, kind=WatchedTrainer, **settings)
    service = OtherExperts(model, tells=True)
    attach(trainer, service)
    trainer.train()
    old = logged(trainer, "sampling/sampling_logp_difference/max")
    found = {"losses": trainer.greatest, "old": old, "asked": len(service.batches)}
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
