"""One rank of a stand-in trainer: a real model in one layout, which changes its weights and publishes them.

`python -m tailrace.lab.benchmarks.live.rank_process RANK_JOB`, where RANK_JOB is a RankJob as JSON. For each version it
prints `ready`, waits for a line on stdin, publishes, and prints a row of figures as JSON. Started by `ranks`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial


@dataclass(frozen=True)
class RankJob:
    """Arguments of one rank. `master`: host and port where the ranks meet. `address`: address of the Ray cluster, or of
    the gateway for a layout that publishes over HTTP. `model`: folder. `layout`: one of `LAYOUTS`. `versions`: versions
    to publish, in order. `timeout_s`: maximum seconds that the ranks wait for one another.
    """

    rank: int
    world_size: int
    master: str
    address: str
    model: str
    layout: str
    versions: tuple[int, ...]
    timeout_s: float

    def text(self) -> str:
        return json.dumps(asdict(self))


RANK_PROGRAM = "tailrace.lab.benchmarks.live.rank_process"

CHANGE = 1.01
"""Factor of all weights from one version to the next. The factor is large enough to change a bfloat16."""

STEP = 2e-6
"""Amount by which each weight changes in layouts that publish deltas: about the learning rate, as under Adam."""

APART, HTTP, DELTAS = "_apart", "_http", "_http_deltas"
"""Endings of names of layouts: the ranks count as two nodes, publish over HTTP, or publish deltas over HTTP."""

LAYOUTS = {"one": 1, "fsdp2_2": 2, "fsdp2_4": 4, "tensor_2": 2} | {f"fsdp2_2{end}": 2 for end in (APART, HTTP, DELTAS)}
"""Number of ranks by layout: one process, FSDP2 or tensor parallelism."""

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")
"""Names of layers that tensor parallelism divides by outputs (COLUMNS) and by inputs (ROWS), as Megatron does."""


def rank_jobs(master: str, layout: str, **shared) -> list[RankJob]:
    """Returns the jobs of all ranks of a layout. `shared`: the other fields of RankJob."""
    size = LAYOUTS[layout]
    return [RankJob(rank=rank, world_size=size, master=master, layout=layout, **shared) for rank in range(size)]


def laid_out(model, layout: str, world_size: int):
    """Returns the model, sharded in place."""
    if layout == "one":
        return model
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    if layout.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name, _ in layer.named_modules() if name.rpartition(".")[2] in COLUMNS}
        plan |= {name: RowwiseParallel() for name, _ in layer.named_modules() if name.rpartition(".")[2] in ROWS}
        parallelize_module(layer, mesh, plan)
    return model


def by_memory(job: RankJob) -> Callable:
    """Returns the call that publishes a version of a model from this rank, through shared memory."""
    from tailrace.app.cluster import connect
    from tailrace.app.weights import publish

    if job.layout.endswith(APART):
        publish.this_node = lambda: f"node {job.rank}"
    return partial(publish.publish, client=connect(job.address), timeout_s=job.timeout_s)


def over_http(job: RankJob) -> Callable:
    """Returns the call that publishes a version from this rank through the gateway, and blocks the rank meanwhile."""
    from tailrace.app.weights.over_http import HttpWeights

    weights = HttpWeights(job.address, deltas=job.layout.endswith(DELTAS))

    def publish(version, model):
        began_s = time.monotonic()
        loaded = weights.publish_blocking(version, model, job.rank, job.world_size, timeout_s=job.timeout_s)
        return loaded.model_copy(update={"staged_s": time.monotonic() - began_s})

    return publish


def changed_by_a_factor(model) -> Callable[[int], None]:
    """Returns a function that multiplies all weights of a model by CHANGE, for its next version."""

    def change(version: int) -> None:
        for parameter in model.parameters():
            parameter.mul_(CHANGE)

    return change


def changed_as_by_adam(model) -> Callable[[int], None]:
    """Returns a function that changes each weight of a model by STEP, up or down at random, for its next version.

    The steps are summed in float32, so few weights of a shorter type change.
    """
    import torch

    local = [
        getattr(parameter, "to_local", lambda parameter=parameter: parameter)() for parameter in model.parameters()
    ]
    masters = [one.detach().float() for one in local]

    def change(version: int) -> None:
        torch.manual_seed(version)
        for master, values in zip(masters, local, strict=True):
            master.add_(torch.randn_like(master).sign(), alpha=STEP)
            values.copy_(master)

    return change


def main(job: RankJob) -> None:
    import torch

    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM

    if job.world_size > 1:
        where = f"tcp://{job.master}"
        torch.distributed.init_process_group("gloo", init_method=where, rank=job.rank, world_size=job.world_size)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype="auto")
    model = laid_out(model, job.layout, job.world_size)
    publish = over_http(job) if HTTP in job.layout else by_memory(job)
    change = (changed_as_by_adam if job.layout.endswith(DELTAS) else changed_by_a_factor)(model)
    for version in job.versions:
        with torch.no_grad():
            change(version)
        print("ready", flush=True)
        sys.stdin.readline()  # all ranks begin at once
        began_s = time.monotonic()
        try:
            loaded = publish(version, model)
        except ValueError as error:
            row = {"refused": str(error)}
        else:
            row = {"paused_s": list(loaded.paused_s.values()), "digest": loaded.digest, "blocked_s": loaded.staged_s}
        print(json.dumps({"update_s": time.monotonic() - began_s} | row), flush=True)
    os._exit(0)  # without teardown: other ranks may not have ended yet


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(RankJob(**given))
