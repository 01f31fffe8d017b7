"""Benchmark of a modelled fleet over the real wire: the coordinator's share of a core, and the delay until a free room
is filled.

One process is the coordinator, the others hold the engines. All are new for each size, so that memory is that of one
size. Called by `tailrace bench fleet`.
"""

from collections.abc import Callable, Sequence
from multiprocessing import get_context

from tailrace.app.errors import Failed
from tailrace.app.files.output_file import OutputFile
from tailrace.lab.benchmarks.control_plane.fleet_coordinator import Fleet, coordinate
from tailrace.lab.benchmarks.control_plane.fleet_engines import host
from tailrace.lab.benchmarks.control_plane.fleet_load import TOKENS_PER_S

HOST_REPLICAS = 512
"""Maximum number of engines in one process: a ZeroMQ context has at most 1,023 sockets."""


def measure(sizes: Sequence[int], running: int, seconds: float, speed: float, past: bool,
            profile: OutputFile | None, say: Callable[[str], None]) -> dict:  # fmt: skip
    """Returns the figures by number of replicas, see `fleet_coordinator.figures`. Raises Failed, in one line."""
    found = {}
    for replicas in sizes:
        fleet = Fleet(replicas=replicas, running=running, seconds=seconds, speed=speed, past=past, profile=profile)
        found[replicas] = one(fleet, say)
        say(f"{replicas} replicas: {found[replicas]}")
    return {"running": running, "past": past, "sizes": found}


def one(fleet: Fleet, say: Callable[[str], None]) -> dict:
    """Returns the figures of one size. Raises Failed if the coordinator's process ends before it sends them."""
    context = get_context("spawn")
    names = [f"r{number:05d}" for number in range(fleet.replicas)]
    count = max(2, -(-fleet.replicas // HOST_REPLICAS))
    parts = [names[number::count] for number in range(count)]
    pipes = [context.Pipe() for _ in parts]
    answer, answering = context.Pipe()
    pace = TOKENS_PER_S * fleet.speed
    processes = [
        context.Process(target=host, args=(part, fleet.running, pace, there), daemon=True)
        for part, (_, there) in zip(parts, pipes, strict=True)
    ]
    processes.append(
        context.Process(target=coordinate, args=(fleet, parts, [here for here, _ in pipes], answering), daemon=True)
    )
    try:
        for process in processes:
            process.start()
        for end in (answering, *(end for pair in pipes for end in pair)):
            end.close()
        while isinstance(found := answer.recv(), str):
            say(found)
        return found
    except EOFError:
        raise Failed("fleet: the coordinator's process has ended; its error is above") from None
    finally:
        for process in processes:
            process.terminate()
            process.join()
