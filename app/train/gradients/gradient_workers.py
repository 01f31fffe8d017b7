"""Threads that each compute one gradient at a time, on copies of the model that share its weights.

Each pass has the same number of torch threads however many workers there are, so its bits do not depend on them. On
CPUs, several passes at a time use the cores better than one pass on all.

If engines use the same cores, the threads run under the scheduling class SCHED_IDLE and take the time that engines
leave. An engine at nice 15, as Ray starts it, then gets nearly all of a core that both use; it would get next to none
of a core that it shares with a thread at nice 0.
"""

import copy
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch

from tailrace.app.train.gradients.gradient import Gradient

Compute = Callable[[torch.nn.Module, dict], Gradient]
"""A pass: leaves no `grad` in the model that it is given."""


class GradientWorkers:
    """`model`: used by one worker; its weights change only while no pass runs. `threads`: torch threads of each worker.

    `idle_priority`: leave the cores to all other work. Linux.
    """

    def __init__(self, model: torch.nn.Module, workers: int, threads: int, idle_priority: bool, compute: Compute):
        self.workers = workers
        self._compute = compute
        self._models: SimpleQueue[torch.nn.Module] = SimpleQueue()
        for copies in range(workers):
            self._models.put(sharing_weights(model) if copies else model)
        self._threads = ThreadPoolExecutor(workers, "gradients", _begin_thread, (threads, idle_priority))

    def submit(self, inputs: dict) -> Future[Gradient]:
        """Returns the future gradient of these inputs, computed once a worker is free."""
        return self._threads.submit(self._run, inputs)

    def close(self) -> None:
        """Returns once the running passes have ended; waiting ones are dropped."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, inputs: dict) -> Gradient:
        model = self._models.get()
        try:
            return self._compute(model, inputs)
        finally:
            self._models.put(model)


def _begin_thread(threads: int, idle_priority: bool) -> None:
    torch.set_num_threads(threads)
    if idle_priority:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread; torch's are its children


def sharing_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy whose parameters share the model's memory, and have a separate `grad`."""
    kept = {id(each): each for each in model.buffers()}
    kept |= {id(each): torch.nn.Parameter(each.detach(), each.requires_grad) for each in model.parameters()}
    return copy.deepcopy(model, kept)


def workers_for(threads: int) -> int:
    """Returns the number of workers for which this process's cores have room; one if gradients are computed on a
    GPU.
    """
    return 1 if torch.cuda.is_available() else max(1, len(os.sched_getaffinity(0)) // threads)
