"""Pauses a request of vLLM for the next steps, or all of them, with their KV kept, and resumes them.

vLLM has no call for it. Its scheduler skips a running request until the step in `next_decode_eligible_step`
(vLLM 0.32, `Scheduler.schedule`). Only its async schedulers set that field, for the requests of a step: no paused one.
Called on the engine's thread, between two steps, with none in flight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 62
QUEUES = ("waiting", "kv_holding_waiting")
"""The scheduler's queues of requests that do not run (vLLM 0.32)."""


def pause(request) -> None:
    """Excludes the request from steps until `resume`. It must have been computed up to its last token."""
    request.next_decode_eligible_step = NEVER


def resume(request) -> None:
    """Includes the request in the next step."""
    request.next_decode_eligible_step = 0


def is_paused(request) -> bool:
    return request.next_decode_eligible_step == NEVER


@contextmanager
def alone(scheduler) -> Iterator[None]:
    """Excludes all present requests from steps, those in vLLM's queues too: a request added meanwhile runs alone.

    It takes a place beyond `max_num_active_seqs`, if the model runner has one.
    """
    from vllm.v1.core.sched.request_queue import create_request_queue

    places, scheduler.max_num_active_reqs = scheduler.max_num_active_reqs, scheduler.max_num_running_reqs
    paused = [request for request in scheduler.running if not is_paused(request)]
    held, deferred = [getattr(scheduler, name) for name in QUEUES], scheduler.deferred_waiting
    for request in paused:
        pause(request)
    for name in QUEUES:
        setattr(scheduler, name, create_request_queue(scheduler.policy))
    scheduler.deferred_waiting = set()
    try:
        yield
    finally:
        scheduler.max_num_active_reqs = places
        for request in paused:
            resume(request)
        for name, queue in zip(QUEUES, held, strict=True):
            for request in getattr(scheduler, name):  # it has lost its KV meanwhile
                queue.add_request(request)
            setattr(scheduler, name, queue)
        scheduler.deferred_waiting |= deferred
