"""Runs to report on, without the simulator: samples are list-scheduled onto the lanes of replicas at a fixed speed.

`static` binds sample i to replica i mod n; `longest` gives the longest sample to the first free lane; with `drafts` a
verification makes `drafts` tokens. Lengths are digests of (seed, index), so the same call makes equal runs.
"""

from hashlib import blake2b
from heapq import heapify, heappop, heappush

from tailrace.lab.simulator.types import Ended, Moment, SimulatedRun, Span

TOKENS_PER_S = 50.0


def lengths_of(samples: int, seed: int, most: int = 4000) -> list[int]:
    """A long tail: most**u tokens, u uniform."""
    digests = (blake2b(f"{seed} {index}".encode(), digest_size=4).digest() for index in range(samples))
    return [max(8, round(most ** (int.from_bytes(digest) / 2**32))) for digest in digests]


def make_run(
    system="static", seed=0, *, samples=64, replicas=4, lanes=4, chunk=1000, drafts=1.0, name=None
) -> SimulatedRun:
    lengths = lengths_of(samples, seed)
    order = sorted(range(samples), key=lambda i: -lengths[i]) if system == "longest" else range(samples)
    free = [(0.0, replica, lane) for replica in range(replicas) for lane in range(lanes)]
    heapify(free)
    by_replica = {replica: [(0.0, lane) for lane in range(lanes)] for replica in range(replicas)}
    spans, ended = [], []
    for index in order:
        sample_id = f"g{index // 4}/{index % 4}" if name is None else name(index)
        if system == "longest":
            at_s, replica, lane = heappop(free)
        else:
            replica = index % replicas
            at_s, lane = heappop(by_replica[replica])
        left, chunks = lengths[index], 0
        while left:
            tokens = min(chunk, left)
            until_s = at_s + tokens / TOKENS_PER_S / drafts
            role = "prefill" if chunks == 0 and index % 7 == 0 else "generate"
            spans.append(Span(replica, sample_id, role, at_s, until_s, tokens, tokens / drafts))
            at_s, left, chunks = until_s, left - tokens, chunks + 1
        if system == "longest":
            heappush(free, (at_s, replica, lane))
        else:
            heappush(by_replica[replica], (at_s, lane))
        steps = lengths[index] / drafts
        moves, preempted = (chunks - 1, 0) if system == "longest" else (0, int(index % 9 == 0))
        drafted, accepted = 8 * steps if drafts > 1 else 0.0, steps * (drafts - 1)
        ended.append(
            Ended(sample_id, 0, lengths[index], 0.0, at_s, chunks, moves, preempted, 5, steps, drafted, accepted)
        )
    makespan_s = max(sample.ended_s for sample in ended)
    work_s = sum(lengths) / (TOKENS_PER_S * drafts * replicas * lanes)
    longest_s = max(lengths) / (TOKENS_PER_S * drafts)
    bounds = {"work_s": work_s, "longest_s": longest_s, "memory_s": work_s / 2, "best_s": max(work_s, longest_s)}
    moments = moments_of(spans, samples, replicas)
    return SimulatedRun(system, "made-up", seed, makespan_s, tuple(ended), moments, tuple(spans), len(spans), bounds)


def moments_of(spans: list[Span], samples: int, replicas: int) -> tuple[Moment, ...]:
    """At each begin and end."""
    changes = sorted((at_s, step) for span in spans for at_s, step in ((span.begin_s, 1), (span.end_s, -1)))
    running, found = 0, []
    for at_s, step in changes:
        running += step
        found.append(Moment(at_s, running, max(0, samples - running), 500 * running, replicas))
    return tuple(found)
