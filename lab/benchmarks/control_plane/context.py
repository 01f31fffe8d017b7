"""Benchmark of one shard of the group context: tokens per second, through a real Ray actor in a process of its own.

Packets are as a busy engine sends them. Several are under way at a time, as from several engines. The best of the
repeats counts: other work on a shared machine only ever makes a run slower. Called by `bench drafts`.
"""

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

from tailrace.app.cluster import LOOPBACK_ONLY
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.group_log import NOWHERE
from tailrace.deployments.context.history import Answer, History
from tailrace.deployments.context.live_groups import Packet, Want
from tailrace.deployments.messages.context import GroupRef, Piece

GROUPS, SAMPLES, PIECE_TOKENS = 8, 8, 16
"""Groups of a packet, samples of a group, and new tokens of a sample: 64 samples in flight, 1,024 new tokens."""

CALLS = 1024
UNDER_WAY = 8
REPEATS = 3


def measure(answers: list[np.ndarray]) -> dict[str, float]:
    """Returns tokens appended and fetched per second, and bytes per token on disk, of these answers (int32)."""
    tokens = np.concatenate(answers)
    tokens = np.resize(tokens, CALLS * PIECE_TOKENS)
    os.environ.update(LOOPBACK_ONLY)  # before Ray is imported
    import ray

    from tailrace.deployments.context.shard import ContextShard

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own handler aborts, and leaves processes behind
    try:
        shard = ray.remote(ContextShard).options(num_cpus=0).remote(ContextConfig(), 0)
        runs = [_run(ray, shard, tokens, f"run-{number}") for number in range(REPEATS)]
    finally:
        ray.shutdown()
    best = {name: round(max(run[name] for run in runs)) for name in runs[0]}
    return best | {"packet_tokens": GROUPS * SAMPLES * PIECE_TOKENS, "disk_bytes_per_token": round(_disk(answers), 3)}


def _run(ray, shard, tokens: np.ndarray, name: str) -> dict[str, float]:
    groups = [GroupRef(f"{name}/{number}", str(number)) for number in range(GROUPS)]
    nothing = Packet.of([])
    packets = [
        Packet.of([
            Piece(group, sample, start, tokens[start : start + PIECE_TOKENS])
            for group in groups for sample in range(SAMPLES)
        ])
        for start in range(0, len(tokens), PIECE_TOKENS)
    ]  # fmt: skip
    busy_s = ray.get(shard.status.remote())["cpu_s"]
    append_s, _ = _timed(ray, (lambda packet=packet: shard.exchange.remote("writer", packet, []) for packet in packets))
    busy_s = ray.get(shard.status.remote())["cpu_s"] - busy_s
    wants = [[Want(group, NOWHERE)] for group in groups]
    fetch_s, replies = _timed(ray, (lambda want=want: shard.exchange.remote("reader", nothing, want) for want in wants))
    total = len(tokens) * GROUPS * SAMPLES
    fetched = sum(len(piece.tokens) for news, _ in replies for piece in news.pieces())
    assert fetched == total, f"{total} tokens appended, {fetched} fetched"
    ray.get([shard.end.remote(group) for group in groups])
    return {
        "append_tokens_per_s": total / append_s,
        "fetch_tokens_per_s": total / fetch_s,
        "append_tokens_per_core_s": total / busy_s,
    }


def _timed(ray, calls) -> tuple[float, list]:
    """Returns the seconds until all calls are answered, with UNDER_WAY calls at a time, and the answers."""
    began_s, under_way, answers = time.perf_counter(), [], []
    for call in calls:
        if len(under_way) == UNDER_WAY:
            answers.append(ray.get(under_way.pop(0)))
        under_way.append(call())
    answers += ray.get(under_way)
    return time.perf_counter() - began_s, answers


def _disk(answers: list[np.ndarray]) -> float:
    """Returns the bytes per token of a history file with these answers, indexes included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.sqlite"
        history = History(path, epochs=1, most_bytes=2**40)
        history.record("prompt", "batch/prompt", 0, (Answer(i, 0, None, True, a) for i, a in enumerate(answers)))
        history.close()
        return path.stat().st_size / sum(map(len, answers))
