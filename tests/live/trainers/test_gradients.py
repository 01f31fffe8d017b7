"""Sums of gradients, and the threads that compute them, on small tensors."""

import os
import platform
import subprocess
import sys
from itertools import permutations

import pytest
import torch
from torch import nn

from tailrace.app.train.gradients.gradient import Gradient, OrderedSum
from tailrace.app.train.gradients.gradient_workers import GradientWorkers, sharing_weights
from tailrace.app.train.logprob_mismatch import LogprobMismatch


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def gradient_of(model, inputs):
    loss = model(inputs["x"]).square().sum()
    loss.backward()
    found = [each.grad for each in model.parameters()]
    model.zero_grad()
    return Gradient(found, loss.detach(), LogprobMismatch(1, 0.5, float(inputs["x"].max())))


def inputs_of(place):
    return {"x": torch.randn(5, 8, generator=torch.Generator().manual_seed(place))}


def terms():
    return [gradient_of(tied(), inputs_of(place)) for place in range(3)]


def test_a_sum_has_the_same_bits_in_whatever_order_its_terms_come():
    found = []
    for coming in permutations(range(3)):
        total, each = OrderedSum((2, 0, 1)), terms()
        for key in coming:
            assert total.result is None
            total.put(key, each[key])
        found.append(total.result)
    assert all(one.loss.equal(found[0].loss) and one.mismatch == found[0].mismatch for one in found)
    assert all(a.equal(b) for one in found for a, b in zip(one.tensors, found[0].tensors, strict=True))
    assert found[0].mismatch.tokens == 3


def test_the_order_of_a_sum_is_seen_in_its_bits():
    """Else the test above would show nothing."""
    sums = []
    for order in permutations(range(3)):
        total = OrderedSum(order)
        for key, each in enumerate(terms()):
            total.put(key, each)
        sums.append(total.result.tensors[0])
    assert any(not each.equal(sums[0]) for each in sums)


def test_a_term_without_a_gradient_adds_its_loss_alone():
    total, (first, second, _) = OrderedSum((0, 1, 2)), terms()
    wanted = [each.clone() for each in second.tensors]
    total.put(1, second)
    for key in (0, 2):
        total.put(key, Gradient([None] * len(first.tensors), torch.tensor(2.0)))
    assert all(a.equal(b) for a, b in zip(total.result.tensors, wanted, strict=True))
    total.result.scale(0.5)
    assert total.result.tensors[0].equal(wanted[0] * 0.5)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_give_the_bits_of_one_thread_and_see_new_weights(workers):
    model = tied()
    pool = GradientWorkers(model, workers, 1, False, gradient_of)
    for _ in range(2):
        futures = [pool.submit(inputs_of(place)) for place in range(8)]
        for place, future in enumerate(futures):
            wanted = gradient_of(sharing_weights(model), inputs_of(place))
            assert all(a.equal(b) for a, b in zip(future.result().tensors, wanted.tensors, strict=True))
        with torch.no_grad():
            model[0].weight.mul_(1.5)  # as an optimizer does, in place
    pool.close()


def test_a_copy_shares_weights_and_has_gradients_of_its_own():
    model = tied()
    model.register_buffer("counts", torch.zeros(3))
    other = sharing_weights(model)
    assert other[1].weight is other[0].weight and other[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert other.counts is model.counts
    other(torch.ones(1, 8)).sum().backward()
    assert other[0].weight.grad is not None and model[0].weight.grad is None


def test_an_error_of_a_pass_is_its_futures():
    def broken(model, inputs):
        raise RuntimeError("no such layer")

    pool = GradientWorkers(tied(), 2, 1, False, broken)
    with pytest.raises(RuntimeError, match="no such layer"):
        pool.submit({}).result()
    pool.close()


@pytest.mark.parametrize(("idle_priority", "scheduler"), [(False, os.SCHED_OTHER), (True, os.SCHED_IDLE)])
def test_workers_leave_cores_to_engines_where_they_are_told_to(idle_priority, scheduler):
    """In a process of its own: an engine in this one would have replaced `torch.set_num_threads`."""
    found = printed(f"""
import os, torch
from tailrace.app.train.gradients.gradient_workers import GradientWorkers
def compute(model, inputs):
    return os.sched_getscheduler(0), torch.get_num_threads()
pool = GradientWorkers(torch.nn.Linear(2, 2), 2, 3, {idle_priority}, compute)
for _ in range(4):
    print(*pool.submit({{}}).result())
pool.close()
print(os.sched_getscheduler(0))
""")
    assert found == [f"{scheduler} 3"] * 4 + [str(os.SCHED_OTHER)], "the last one is of a thread that changed nothing"


def printed(script: str) -> list[str]:
    """The lines that a process of this script prints."""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


PR_SET_THP_DISABLE = 41
"""A call of Linux, by the number in its prctl.h."""


def faults(keep: bool) -> list[int]:
    """Pages that the kernel clears for each of three blocks of 64 MB, one freed before the next one is asked for.

    They are small ones: some kernels give 2 MB at a time to all that ask.
    """
    lines = printed(f"""
import ctypes, resource
from tailrace.app.train.gradients.freed_memory import keep_freed_memory
assert not {keep} or keep_freed_memory()
libc = ctypes.CDLL(None)
assert libc.prctl({PR_SET_THP_DISABLE}, 1, 0, 0, 0) == 0
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(1 << 26)
    ctypes.memset(block, 1, 1 << 26)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    libc.free(block)
""")
    return [int(line) for line in lines]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept():
    assert all(count < 100 for count in faults(keep=True)[1:])
    assert all(count > 1000 for count in faults(keep=False)[1:]), "else there is nothing to gain"
