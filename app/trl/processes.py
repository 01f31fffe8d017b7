"""Work of a trainer's first process, whose answer or error all of its processes get: none waits for one that failed."""

from collections.abc import Callable
from typing import TypeVar

from tailrace.app.errors import Failed

Answer = TypeVar("Answer")


def for_all(accelerator, work: Callable[[], Answer]) -> Answer:
    """Returns in each process what `work` returns in the first. Raises its error there, and Failed in the others."""
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    answer, error = None, None
    if accelerator.is_main_process:
        try:
            answer = work()
        except Exception as raised:  # noqa: BLE001 - the other processes wait for it
            error = raised
    line = None if error is None else " ".join(f"{type(error).__name__}: {error}".split())
    answer, line = broadcast_object_list([answer, line], from_process=0)
    if error is not None:
        raise error
    if line is not None:
        raise Failed(f"the trainer's first process has failed: {line}")
    return answer
