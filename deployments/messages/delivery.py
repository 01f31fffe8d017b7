"""Flow of finished groups to a driver: the size of a group, and how many bytes travel unacknowledged.

Serve's streams have no back-pressure: without a window, all groups would pile up at a slow driver. Used by the client,
which acknowledges, and by the coordinator, which holds the rest.
"""

from tailrace.deployments.messages.rollout import GroupResult

WINDOW_BYTES = 64 << 20
"""Maximum number of bytes sent to a driver and not acknowledged; the coordinator holds further groups."""

ACKNOWLEDGE_BYTES = WINDOW_BYTES // 4
"""Number of received bytes after which a client acknowledges at once; fewer are acknowledged with the next renewal of
its lease.
"""

TOKEN_BYTES = 12
"""Bytes of an answer's token in memory: its id and two logprobs, 4 each."""

SAMPLE_BYTES = 2_000
"""Bytes of a sample besides its tokens: segments, timings and counts. Its text is decoded only on request."""


def result_bytes(group: GroupResult) -> int:
    """Returns the memory of a finished group in bytes, estimated from its numbers of samples and tokens."""
    answers = sum(SAMPLE_BYTES + TOKEN_BYTES * len(one.token_ids) for one in group.samples)
    return answers + 4 * len(group.prompt_token_ids)
