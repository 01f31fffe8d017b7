"""Whose rank changes goes to the cores of the new one: those of the old one are the next replica's."""

import os
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.launch import core_ids, rebind

CORES = sorted(os.sched_getaffinity(0))


@contextmanager
def waiting_thread(cores: list[int]):
    """Its number, while it lives; bound to these cores."""
    ready, over = Event(), Event()

    def wait():
        os.sched_setaffinity(0, cores)
        ready.set()
        over.wait()

    thread = Thread(target=wait)
    thread.start()
    ready.wait()
    yield thread.native_id
    over.set()
    thread.join()


def test_ranks_take_their_cores_in_turn():
    assert [core_ids(rank, 2, [3, 5, 7, 9]) for rank in (0, 1, 2, -1)] == [[3, 5], [7, 9], [3, 5], [7, 9]]


@pytest.mark.parametrize(("cores", "moves"), [(1, True), (None, False)])
def test_threads_on_the_cores_of_the_old_rank_move_and_others_stay(cores, moves):
    old, new = (core_ids(rank, 1, CORES) for rank in (1, 0))
    with waiting_thread(old) as bound, waiting_thread(CORES) as free:
        rebind(EngineConfig(model="m", cores=cores), 1, 0)
        assert os.sched_getaffinity(bound) == set(new if moves else old)
        assert os.sched_getaffinity(free) == set(CORES)
    assert sorted(os.sched_getaffinity(0)) == CORES
