"""A worker of TRL's `AsyncGRPOTrainer`: groups are made beside training, as far ahead of it as its staleness allows.

Upstream symbol: `RolloutWorkerProtocol` of trl/experimental/async_grpo/async_grpo_trainer.py. Invariant: groups are
handed over whole and in the order of the data set, so short answers are not favoured. `async_rollouts` makes them of
prompts, `async_trajectories` by a harness.
"""

import asyncio
import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

from tailrace.app.errors import BadInput, Failed
from tailrace.app.trl.allowance import Allowance
from tailrace.app.trl.async_weights import AsyncWeights
from tailrace.app.trl.sample_queue import SampleQueue
from tailrace.app.trl.scored_group import MakeGroup, ScoredGroup, samples_of_a_step
from tailrace.deployments.messages.errors import one_line

BEAT_S = 1.0
"""Maximum seconds between two heartbeats of the worker's thread."""

STOP_S = 15.0
"""Seconds for which `stop` waits for the thread: a reward function or a harness may be running. TRL waits as long."""


class AsyncWorker:
    """A `rollout_worker`. `weights`: the trainer's `weight_transfer`, which knows the versions of the service.

    `args`: the trainer's `AsyncGRPOConfig`. `first_group`: number of the group to start with, counted over all passes
    through the data. `branches`: groups may have more samples than `num_generations`, or fewer. Raises BadInput for
    unsupported settings.
    """

    def __init__(
        self, make: MakeGroup, weights: AsyncWeights, *, args, train_dataset, first_group: int, branches: bool = False
    ):
        _check(args)
        self._make, self._weights, self._args = make, weights, args
        self._allowance = Allowance(
            group=args.num_generations,
            per_version=samples_of_a_step(args) * args.weight_sync_steps,
            max_staleness=args.max_staleness,
            at_once=args.per_device_train_batch_size * args.world_size,
            fixed=args.token_budget <= 0,
            branches=branches,
            max_in_hand=args.queue_maxsize if args.queue_maxsize > 0 else sys.maxsize,
            max_in_flight=args.max_inflight_tasks if args.max_inflight_tasks > 0 else sys.maxsize,
        )
        self._rows = _rows(train_dataset, first_group)
        self.rollout_buffer = SampleQueue(self._drawn, self._wake)
        self.metrics_queue: queue.Queue = queue.Queue()
        self._under_way: deque[asyncio.Task[ScoredGroup]] = deque()  # in the order of the data set
        self._version = self._first_version = self._ahead = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: asyncio.Event | None = None
        self._stopping, self._failure, self._beat_at = False, None, 0.0

    def start(self) -> None:
        """Starts the worker. Called by the trainer after the first weights were sent."""
        if self._thread is not None:
            return
        self._first_version, self._allowance.version = self._version, 0
        self._beat_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="async-worker")
        self._thread.start()

    def stop(self) -> None:
        """Cancels the batches in flight, and ends the thread."""
        self._stopping = True
        self._wake()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """Sets the trainer's version. `model_version`: the trainer's number of the weights that it sent last."""
        if self._weights.version is None:
            raise BadInput("the trainer has not sent weights by this worker's AsyncWeights: give it as weight_transfer")
        self._ahead = self._weights.version - model_version
        self._version = model_version
        self._allowance.version = model_version - self._first_version
        self._wake()

    def check_health(self, stale_after_s: float) -> None:
        """Raises Failed with the reason if the worker has failed, or its thread has not run for `stale_after_s`."""
        if self._failure is not None:
            known = isinstance(self._failure, Failed | BadInput)
            raise Failed(str(self._failure) if known else one_line(self._failure)) from self._failure
        silent_s = time.monotonic() - self._beat_at
        if silent_s > stale_after_s:
            raise Failed(f"the thread that collects samples has not run for {silent_s:.0f} s")

    def _drawn(self, sample) -> None:
        """Counts a drawn sample. Called on the trainer's thread, which drops a sample that is too old."""
        self._allowance.drawn += 1
        if self._version - sample.model_version > self._args.max_staleness:
            self._allowance.dropped += 1
        self._wake()

    def _wake(self) -> None:
        """Wakes the thread, which then checks for work."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._woken.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._collect())
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: the trainer's thread raises it
            self._failure = error
            self.rollout_buffer.end()

    async def _collect(self) -> None:
        self._woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            while not self._stopping:
                self._beat_at = time.monotonic()
                self._begin()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), BEAT_S)
                self._woken.clear()
                self._hand_over()
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    def _begin(self) -> None:
        """Starts the groups that are allowed now."""
        for _ in range(self._allowance.groups(self.rollout_buffer.waiting)):
            number, row = next(self._rows)
            task = asyncio.create_task(self._make(number, row, self._version_of))
            task.add_done_callback(lambda _: self._woken.set())
            self._under_way.append(task)
            self._allowance.begun += 1

    def _version_of(self, weights_version: int) -> int:
        """Returns the trainer's number of weights that the service has under another."""
        return weights_version - self._ahead

    def _hand_over(self) -> None:
        """Queues the groups that have ended, but none before an earlier one. Raises the error of any that failed."""
        for task in self._under_way:
            if task.done():
                task.result()
        while self._under_way and self._under_way[0].done():
            group = self._under_way.popleft().result()
            self._allowance.end(len(group.samples))
            for sample, newest in zip(group.samples, group.newest, strict=True):
                sample.metrics["rollout/newest_version"] = float(newest)
                sample.metrics["rollout/staleness_at_end"] = float(self._version - sample.model_version)
                sample.enqueued_at = time.time()
                self.rollout_buffer.put(sample)
            self.metrics_queue.put(group.metrics | {"rollout/inflight": float(self._allowance.in_flight)})
            if self._args.log_completions:
                self._print(group)

    def _print(self, group: ScoredGroup) -> None:
        from trl.trainer.utils import print_prompt_completions_sample

        print_prompt_completions_sample(
            prompts=[sample.prompt for sample in group.samples],
            completions=[sample.completion for sample in group.samples],
            rewards={"reward": [sample.metrics["reward"] for sample in group.samples]},
            advantages=[sample.advantage for sample in group.samples],
            step=group.number,
            num_samples=self._args.num_completions_to_print,
        )


def _check(args) -> None:
    if args.token_budget is None:
        raise BadInput("token_budget is not set, so TRL would ask a vLLM server for it; 0: micro-batches by samples")
    for name in ("max_inflight_tasks", "queue_maxsize"):
        value = getattr(args, name)
        if 0 < value < args.num_generations:
            raise BadInput(f"{name} is {value}, less than the {args.num_generations} samples of a group")


def _rows(data, first: int) -> Iterator[tuple[int, dict]]:
    """Yields (number, row) without end, in the order of the data set, starting with group `first`."""
    number = 0
    while True:
        before = number
        if hasattr(data, "__len__") and 0 < len(data) <= first - number:
            number += len(data)  # no row of this pass is needed
            continue
        for row in data:
            if number >= first:
                yield number, row
            number += 1
        if number == before:
            raise BadInput("the data set has no rows")
