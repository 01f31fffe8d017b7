"""One rank of a trainer, as a process: torch.distributed over gloo, models in several layouts, and a death on request.

The service is a `publication_server`. Ranks are forked from a process that has imported this file, since torch takes
seconds.
"""

import asyncio
import os
import signal
from dataclasses import dataclass
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
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from waiting import until

from tailrace.app.calls import publishing_rank
from tailrace.app.calls.refused import accepted
from tailrace.app.weights import publish as publishing
from tailrace.app.weights.held_pieces import Slice, named_tensors
from tailrace.deployments.messages.pieces import PublishPhase
from tailrace.deployments.staging.piece_files import PieceFiles
from tailrace.deployments.staging.slots import Slots

TIMEOUT_S = {None: 120.0, "before": 3.0, "manifest": 15.0, "staging": 15.0, "staged": 15.0, "load": 60.0}
"""Limit of the ranks, by where one of them dies: a busy machine has it for all before, and a test waits for it."""


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class WireClient:
    """A client of a `publication_server`."""

    def __init__(self, address: str, rank: int, death: str | None):
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
                die()  # what was sent arrives
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


def mixture() -> nn.Module:
    """Of five experts, which no number of ranks divides, joined into one parameter a layer."""
    shape = {"hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"head_dim": 6, "vocab_size": 20, "num_hidden_layers": 2}
    shape |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))


def sharded(model, mesh) -> nn.Module:
    for block in model.blocks if isinstance(model, Model) else model.model.layers:
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
        case "fsdp" | "experts":
            return sharded(model if layout == "fsdp" else mixture(), init_device_mesh("cpu", (world,)))
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
    return revert_weight_conversion(held, found) if layout == "experts" else found


@dataclass(frozen=True)
class Ranks:
    """What all ranks of a trainer know. `address`: of the service. `death`: the rank that dies, and where, or None.

    The whole tensors of each layout, gathered for the test alone, are saved in `root`, and so is what a rank says.
    """

    world: int
    address: str
    root: Path
    layouts: tuple[str, ...]
    death: tuple[int, str] | None

    def said(self, rank: int) -> Path:
        return self.root / f"rank-{rank}.txt"

    @property
    def timeout_s(self) -> float:
        return TIMEOUT_S[self.death and self.death[1]]

    def let_the_first_lead(self) -> None:
        """Returns once rank 0 has begun the slot, unless it is dead by then."""
        if self.death != (0, "before"):
            until(Slots("app-0", self.root).part.exists, self.timeout_s)


def main(ranks: Ranks, rank: int) -> None:
    """Publishes each layout, or dies."""
    death = ranks.death[1] if ranks.death is not None and ranks.death[0] == rank else None
    publishing_rank.Slots = lambda service: Slots(service, ranks.root)
    publishing.this_node = lambda: "here"
    torch.set_num_threads(1)
    group = {"rank": rank, "world_size": ranks.world, "init_method": f"file://{ranks.root}/meeting"}
    dist.init_process_group("gloo", **group)
    client = WireClient(ranks.address, rank, death)
    if death == "manifest":
        publishing_rank.PublishingRank._write = die
    if death == "staging":
        real = PieceFiles.write
        PieceFiles.write = lambda self, *given: (real(self, *given), die())
    for number, layout in enumerate(ranks.layouts, 1):
        held = held_by(layout, rank, ranks.world)
        dist.barrier()
        if death == "before":
            die()
        if rank:
            ranks.let_the_first_lead()
        with ranks.said(rank).open("a") as said:
            try:
                loaded = publishing.publish(number, held, client=client, timeout_s=ranks.timeout_s)
                print(f"loaded {loaded.version} {loaded.digest}", file=said)
            except ValueError as error:
                print(f"refused {error}", file=said, flush=True)
                os._exit(0)  # no peer is there for the group's own end
        whole = gathered(layout, held, rank, ranks.world)
        if rank == 0:
            save_file({name: tensor.clone() for name, tensor in whole.items()}, ranks.root / f"{layout}.safetensors")
    dist.barrier()
    os._exit(0)
