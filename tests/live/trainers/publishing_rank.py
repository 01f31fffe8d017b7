"""One rank of a trainer, as a process: torch.distributed over gloo, models in several layouts, and a death on request.

`publishing_rank.py RANK WORLD PORT ADDRESS ROOT LAYOUT,... MORTAL DEATH`. MORTAL: whether a rank dies; DEATH: how this
one does, or none. The service is a `publication_server`. Saves the whole tensors of each layout, gathered for the test
alone, in ROOT.
"""

import asyncio
import os
import signal
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tailrace.app.calls import publishing_rank
from tailrace.app.calls.refused import accepted
from tailrace.app.weights import publish as publishing
from tailrace.app.weights.held_pieces import Slice, named_tensors
from tailrace.deployments.messages.pieces import PublishPhase
from tailrace.deployments.staging.piece_files import PieceFiles
from tailrace.deployments.staging.slots import Slots

TIMEOUT_S = {True: 6.0, False: 60.0}
"""Limit of the ranks, by whether one of them dies: the machine may be busy."""


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class WireClient:
    """A client of a `publication_server`."""

    def __init__(self, address: str, rank: int, death: str):
        self._address, self._rank, self._death = address, rank, death

    async def own_slots(self) -> str:
        return "app-0"

    async def status(self) -> SimpleNamespace:
        return SimpleNamespace(weights_version=0, weights_digest="")

    @property
    def publishing(self) -> "WireClient":
        return self

    async def run(self, phase, version, rank, content=None):
        return accepted(await asyncio.to_thread(self._ask, phase, version, rank, content), "publish_weights")

    def _ask(self, phase, *rest):
        with Client(self._address, authkey=b"test") as line:
            line.send((os.getpid(), phase, *rest))
            if self._death == "staged" and phase is PublishPhase.STAGED:
                time.sleep(0.5)
                die()
            return line.recv()


class Block(nn.Module):
    """Two matrices of odd sizes, and a buffer that every rank has."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    """Tied embeddings of 13 rows, which no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.Parameter(torch.rand(6, dtype=torch.bfloat16))


def sharded(model, mesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel(model, mesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def held_by(layout: str, rank: int, world: int):
    """What this rank has of the model, the same on all ranks before it is laid out."""
    torch.manual_seed(len(layout))
    model = Model()
    match layout:
        case "fsdp":
            return sharded(model, init_device_mesh("cpu", (world,)))
        case "tensor":
            return parallel(model, init_device_mesh("cpu", (world,)))
        case "hybrid":
            return sharded(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "shard")))
        case "both":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
            return sharded(parallel(model, mesh["tensor"]), mesh["data"])
        case "columns":
            mesh = init_device_mesh("cpu", (world,))
            weights = model.state_dict()
            held = {name: distribute_tensor(w, mesh, [Shard(w.ndim - 1)]) for name, w in weights.items()}
            return held | {"norm": distribute_tensor(weights["norm"], mesh, [Replicate()])}
        case "slices":
            held = {name: w for name, w in model.state_dict().items() if rank == 0 or name != "norm"}
            whole = held.pop("head.weight")
            ends = [13 * each // world for each in range(world + 1)]
            mine = whole[ends[rank] : ends[rank + 1]]
            return held | {"head.weight": Slice(mine, tuple(whole.shape), (ends[rank], 0))}
    raise ValueError(layout)


def gathered(layout: str, held, rank: int, world: int) -> dict:
    """The whole tensors, by collectives."""
    if layout == "slices":
        torch.manual_seed(len(layout))
        return dict(Model().state_dict())
    found = {}
    for name, value in named_tensors(held):
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().contiguous()
    return found


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    address, root, layouts = sys.argv[4], Path(sys.argv[5]), sys.argv[6].split(",")
    timeout_s, death = TIMEOUT_S[sys.argv[7] == "mortal"], sys.argv[8]
    publishing_rank.Slots = lambda service: Slots(service, root)
    publishing.this_node = lambda: "here"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    client = WireClient(address, rank, death)
    if death == "manifest":
        publishing_rank.PublishingRank._write = die
    if death == "staging":
        real = PieceFiles.write
        PieceFiles.write = lambda self, *given: (real(self, *given), die())
    for number, layout in enumerate(layouts, 1):
        held = held_by(layout, rank, world)
        dist.barrier()
        if rank:
            time.sleep(0.5)  # rank 0 leads
        if death == "before":
            die()
        try:
            loaded = publishing.publish(number, held, client=client, timeout_s=timeout_s)
            print(f"loaded {loaded.version} {loaded.digest}", flush=True)
        except ValueError as error:
            print(f"refused {error}", flush=True)
            os._exit(0)  # no peer is there for the group's own end
        whole = gathered(layout, held, rank, world)
        if rank == 0:
            save_file({name: tensor.clone() for name, tensor in whole.items()}, root / f"{layout}.safetensors")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
