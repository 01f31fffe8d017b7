"""The states of a sample, and the table of its transitions, which tests compare with what the core does.

Read by `scripts/core_states.py`, which writes the table and its diagram into docs/architecture.md.
"""

from enum import Enum
from typing import NamedTuple


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"  # between two turns
    ENDED = "ended"


WAITING, RUNNING, HELD, ENDED = State
"""Members as globals: a lookup in the class takes a quarter of a microsecond, several times per event."""


class Row(NamedTuple):
    """One transition. `state`: before the event; None if the core does not know the sample yet. `actions`: in words."""

    state: State | None
    event: str
    condition: str
    then: State
    actions: str


TABLE = (
    Row(None, "SamplesSubmitted", "valid and new", WAITING, ""),
    Row(None, "SamplesSubmitted", "an earlier coordinator has made all of it", ENDED, "EndSample(stop or length)"),
    Row(WAITING, "Tick", "a replica has room", RUNNING, "StartChunk"),
    Row(WAITING, "Tick", "all replicas idle, its chunk fits nowhere", ENDED, "EndSample(failed)"),
    Row(None, "SamplesSubmitted", "new, in a group that is open", WAITING, ""),
    Row(WAITING, "BatchCancelled", "", ENDED, "EndSample(cancelled)"),
    Row(WAITING, "SampleCancelled", "", ENDED, "EndSample(cancelled)"),
    Row(WAITING, "ReplicaLeft", "it was bound there", WAITING, ""),
    Row(WAITING, "WeightsChanged", "", WAITING, "ReleaseKv of the old version"),
    Row(WAITING, "KvLost", "", WAITING, ""),
    Row(RUNNING, "TokensStreamed", "", RUNNING, ""),
    Row(RUNNING, "Tick", "a replica has room for a copy", RUNNING, "StartChunk of the copy"),
    Row(RUNNING, "BatchCancelled", "", RUNNING, "AbortChunk"),
    Row(RUNNING, "SampleCancelled", "", RUNNING, "AbortChunk"),
    Row(RUNNING, "WeightsChanged", "", RUNNING, "AbortChunk; ReleaseKv of the old version"),
    Row(RUNNING, "ChunkFinished", "stop token or length reached", ENDED, "EndSample(stop or length)"),
    Row(RUNNING, "ChunkFinished", "stop token or length reached, another turn may come", HELD, "EndTurn"),
    Row(RUNNING, "ChunkFinished", "tokens remain", WAITING, ""),
    Row(RUNNING, "ChunkFinished", "tokens remain, batch or sample cancelled", ENDED, "EndSample(cancelled)"),
    Row(RUNNING, "ChunkFinished", "a copy was first, or another copy continues", RUNNING, ""),
    Row(RUNNING, "ChunkFailed", "a copy continues", RUNNING, ""),
    Row(RUNNING, "ChunkFailed", "the replica or the sample may be to blame", WAITING, "both may pause"),
    Row(RUNNING, "ChunkFailed", "the sample is to blame", ENDED, "EndSample(failed)"),
    Row(RUNNING, "ChunkFailed", "the sample is not given up, batch or sample cancelled", ENDED, "EndSample(cancelled)"),
    Row(RUNNING, "ReplicaLeft", "a copy continues elsewhere", RUNNING, ""),
    Row(RUNNING, "ReplicaLeft", "the sample may have ended it", WAITING, "from the second in a row until its trial"),
    Row(RUNNING, "ReplicaLeft", "the third while the sample was alone on trial", ENDED, "EndSample(failed)"),
    Row(RUNNING, "ReplicaLeft", "before that, batch or sample cancelled", ENDED, "EndSample(cancelled)"),
    Row(HELD, "SampleReturned", "", WAITING, ""),
    Row(HELD, "Tick", "no further turn in its time", ENDED, "EndSample(as its last turn)"),
    Row(HELD, "BatchCancelled", "", ENDED, "EndSample(as its last turn)"),
    Row(HELD, "SampleCancelled", "", ENDED, "EndSample(as its last turn)"),
    Row(HELD, "WeightsChanged", "", HELD, "ReleaseKv of the old version"),
    Row(HELD, "KvLost", "", HELD, ""),
)
