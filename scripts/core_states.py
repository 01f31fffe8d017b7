"""Write the state table of a sample, and the diagram made from it, into docs/architecture.md.

`TABLE` is the only source: a row is (state, event, condition, next state, actions). `None` is no state yet.
"""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- core_states: begin -->", "<!-- core_states: end -->"

TABLE = (
    (None, "SamplesSubmitted", "valid and new", "waiting", ""),
    (None, "SamplesSubmitted", "an earlier coordinator has made all of it", "ended", "EndSample(stop or length)"),
    ("waiting", "Tick", "a replica has room", "running", "StartChunk"),
    ("waiting", "Tick", "all replicas idle, its chunk fits nowhere", "ended", "EndSample(failed)"),
    (None, "SamplesSubmitted", "new, in a group that is open", "waiting", ""),
    ("waiting", "BatchCancelled", "", "ended", "EndSample(cancelled)"),
    ("waiting", "SampleCancelled", "", "ended", "EndSample(cancelled)"),
    ("waiting", "ReplicaLeft", "it was bound there", "waiting", ""),
    ("waiting", "WeightsChanged", "", "waiting", "ReleaseKv of the old version"),
    ("waiting", "KvLost", "", "waiting", ""),
    ("running", "TokensStreamed", "", "running", ""),
    ("running", "Tick", "a replica has room for a copy", "running", "StartChunk of the copy"),
    ("running", "BatchCancelled", "", "running", "AbortChunk"),
    ("running", "SampleCancelled", "", "running", "AbortChunk"),
    ("running", "WeightsChanged", "", "running", "AbortChunk; ReleaseKv of the old version"),
    ("running", "ChunkFinished", "stop token or length reached", "ended", "EndSample(stop or length)"),
    ("running", "ChunkFinished", "stop token or length reached, another turn may come", "held", "EndTurn"),
    ("running", "ChunkFinished", "tokens remain", "waiting", ""),
    ("running", "ChunkFinished", "tokens remain, batch or sample cancelled", "ended", "EndSample(cancelled)"),
    ("running", "ChunkFinished", "a copy was first, or another copy continues", "running", ""),
    ("running", "ChunkFailed", "a copy continues", "running", ""),
    ("running", "ChunkFailed", "the replica or the sample may be to blame", "waiting", "both may pause"),
    ("running", "ChunkFailed", "the sample is to blame", "ended", "EndSample(failed)"),
    (
        "running",
        "ChunkFailed",
        "the sample is not given up, batch or sample cancelled",
        "ended",
        "EndSample(cancelled)",
    ),
    ("running", "ReplicaLeft", "a copy continues elsewhere", "running", ""),
    ("running", "ReplicaLeft", "the sample may have ended it", "waiting", "from the second in a row until its trial"),
    ("running", "ReplicaLeft", "the third while the sample was alone on trial", "ended", "EndSample(failed)"),
    ("running", "ReplicaLeft", "before that, batch or sample cancelled", "ended", "EndSample(cancelled)"),
    ("held", "SampleReturned", "", "waiting", ""),
    ("held", "Tick", "no further turn in `hold_s`", "ended", "EndSample(as its last turn)"),
    ("held", "BatchCancelled", "", "ended", "EndSample(as its last turn)"),
    ("held", "SampleCancelled", "", "ended", "EndSample(as its last turn)"),
    ("held", "WeightsChanged", "", "held", "ReleaseKv of the old version"),
    ("held", "KvLost", "", "held", ""),
)


def table() -> str:
    """The transitions as a Markdown table."""
    rows = [f"| {state or 'new'} | `{event}` | {when} | {then} | {does} |" for state, event, when, then, does in TABLE]
    return "\n".join(["| state | event | condition | next | actions |", "|---|---|---|---|---|", *rows])


def diagram() -> str:
    """The transitions that change the state, as a Mermaid state diagram."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, event, _, then, _ in TABLE:
        if state != then:
            events = arrows.setdefault((state or "[*]", then), [])
            events += [] if event in events else [event]
    lines = [f"    {state} --> {then}: {', '.join(events)}" for (state, then), events in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "    ended --> [*]", "```"])


def rendered(page: str) -> str:
    """The page with the generated part renewed."""
    block = f"{BEGIN}\n{table()}\n\n{diagram()}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
