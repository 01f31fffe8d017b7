"""Flow of finished groups to a driver: the size of a group, and how many bytes travel unacknowledged.

Serve's streams have no back-pressure: without a window, all groups would pile up at a slow driver. Known to the client,
which acknowledges, and to the coordinator, which holds the rest.
"""

from tailrace.deployments.messages.rollout import GroupResult

WINDOW_BYTES = 64 << 20
"""Bytes given to a driver and not acknowledged from which on the coordinator holds further groups."""

ACKNOWLEDGE_BYTES = WINDOW_BYTES // 4
"""A client acknowledges at once after this many; fewer go with its next sign of life."""

TOKEN_BYTES = 12
"""Of an answer in memory: its id and two logprobs, 4 each."""

SAMPLE_BYTES = 2_000
"""Of a sample besides its tokens: segments, timings and counts. Its text is not there until it is asked for."""


def result_bytes(group: GroupResult) -> int:
    """Memory of a finished group in bytes, estimated from its numbers of samples and tokens."""
    answers = sum(SAMPLE_BYTES + TOKEN_BYTES * len(one.token_ids) for one in group.samples)
    return answers + 4 * len(group.prompt_token_ids)
