"""Seconds of work on a GPU, by CUDA events. On a CPU one call is timed by the clock, which shows that the call runs."""

import time
from collections.abc import Callable

import torch

GRAPH_CALLS = 10
"""Number of calls in a CUDA graph, and of inputs that take turns in it."""


def seconds_of(run: Callable, repeats: int = 20) -> float:
    """Returns the median seconds of a call on a GPU, or the seconds of one call on a CPU. A first call is not timed."""
    run()
    if not torch.cuda.is_available():
        began_s = time.perf_counter()
        run()
        return time.perf_counter() - began_s
    torch.cuda.synchronize()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in pairs)[repeats // 2] / 1e3


def seconds_without_launches(run: Callable, repeats: int = 20) -> float:
    """Returns the median seconds of a call without the host's launches, from replays of a CUDA graph of GRAPH_CALLS
    calls.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            run()
    return seconds_of(graph.replay, repeats) / GRAPH_CALLS


def microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
