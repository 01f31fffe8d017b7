"""Loads new weights into a running engine: from a folder, and from another process's GPU memory by CUDA IPC."""

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from tailrace.deployments.messages.command import LoadWeights, ReadWeights, TransferWeights
from tailrace.deployments.messages.transfer import Transfer, TransferPhase
from tailrace.lab.benchmarks.gpu.made_models import WEIGHTS
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.engine import CheckedEngine, made, vocabulary_of
from tailrace.lab.benchmarks.gpu.steps.ours import started

SHAPE = "1.7B"
SERVICE = "gpu-check"
TRAINER_S = 120.0
"""Maximum seconds until the other process has its weights on the device."""


def weights(step: Measurements) -> None:
    transfer = {"weight_transfer_config": {"backend": "ipc"}} if step.place.card else {}
    case = NewWeights(step, SHAPE, started(step, SHAPE, eager=True, draft="off", **transfer))
    step.tried("from a folder", case.from_a_folder)
    step.on_card("by CUDA IPC", case.by_ipc)


class NewWeights:
    """An engine on a model folder, and a second folder with other weights of the same shape."""

    def __init__(self, step: Measurements, shape: str, engine: CheckedEngine):
        self._step, self._engine = step, engine
        (self._old, _), (self._new, _) = made(step.place, shape), made(step.place, shape, seed=1)
        self._prompt = np.random.default_rng(0).integers(3, vocabulary_of(step.place, shape), 8, np.int32)
        self._tokens_of_new: list[int] = []

    def _tokens(self, name: str) -> list[int]:
        self._engine.version = self._engine.stepper.stats().weights_version
        chunk = self._engine.chunk(name, 0, self._prompt, [], self._step.place.of(32, 4), "weights")
        return self._engine.run([chunk])[name].token_ids.tolist()

    def _load(self, version: int, source: str) -> float:
        began_s = time.perf_counter()
        self._engine.obeyed(self._engine.loop.ask(LoadWeights(version, source)))
        return time.perf_counter() - began_s

    def from_a_folder(self) -> dict:
        before = self._tokens("w0")
        first_s = self._load(1, self._new)
        self._tokens_of_new = self._tokens("w1")
        second_s = self._load(2, self._old)
        returned = self._tokens("w2") == before
        held = self._engine.obeyed(self._engine.loop.ask(ReadWeights()))
        return {
            "first_s": first_s,
            "second_s": second_s,
            "changed": self._tokens_of_new != before,
            "returned": returned,
            "held_unlike": len(held.unlike or ()),
            "not_read": held.problem,
            "gib": os.path.getsize(Path(self._new) / WEIGHTS) / 2**30,
        }

    def by_ipc(self) -> dict:
        """Returns the seconds of each phase of a transfer, and whether the tokens are those of the same weights loaded
        from a folder.
        """
        from tailrace.deployments.staging.slots import Slots

        ours, theirs = get_context("spawn").Pipe()
        trainer = get_context("spawn").Process(target=hand_out, args=(theirs, self._new), daemon=True)
        trainer.start()
        theirs.close()  # else the end of the other process would not be seen here
        try:
            seconds = self._transfer(_handles(ours))
            same = self._tokens("w3") == self._tokens_of_new
            ours.send("done")
            trainer.join(10)
        finally:
            trainer.kill()
            Slots(SERVICE).remove()
        return {"seconds": seconds, "same_as_by_folder": same}

    def _transfer(self, info: dict) -> dict[str, float]:
        seconds: dict[str, float] = {}

        def timed(name: str, run: Callable):
            began_s = time.perf_counter()
            found = run()
            seconds[name] = round(time.perf_counter() - began_s, 3)
            return found

        def phase(which: TransferPhase, content: dict | None = None):
            transfer = Transfer(phase=which, info=content, version=3, served=(0, ""), service=SERVICE)
            return timed(
                which.name.lower(), lambda: self._engine.obeyed(self._engine.loop.ask(TransferWeights(transfer)))
            )

        phase(TransferPhase.INIT, {})
        phase(TransferPhase.START)
        phase(TransferPhase.PART, info)
        source = phase(TransferPhase.FINISH)
        timed("load", lambda: self._load(3, source))
        return seconds


def _handles(line) -> dict:
    """Returns what the other process sends first. Raises RuntimeError if that process ends, or does not answer in
    TRAINER_S.
    """
    try:
        if line.poll(TRAINER_S):
            return line.recv()
    except EOFError:
        raise RuntimeError("the process with the weights ended; the log says why") from None
    raise RuntimeError(f"the process with the weights did not answer in {TRAINER_S:.0f} s")


def hand_out(line, folder: str) -> None:
    """Loads the weights into GPU memory, in another process, and sends their handles as vLLM's trainer does. Returns
    once `line` receives a message.
    """
    import torch
    from safetensors.torch import load_file
    from torch.multiprocessing.reductions import reduce_tensor

    held = {name: tensor.cuda() for name, tensor in load_file(Path(folder) / WEIGHTS).items()}
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    line.send(
        {
            "names": list(held),
            "dtype_names": [str(each.dtype).split(".")[-1] for each in held.values()],
            "shapes": [list(each.shape) for each in held.values()],
            "ipc_handles": [{uuid: reduce_tensor(each)[1]} for each in held.values()],
        }
    )
    line.recv()
