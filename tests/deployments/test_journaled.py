"""Chunks counted by a journal: of a core with two replicas, and of a recorded live run."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from tailrace.deployments.coordinator.journal import JournaledCore, read_journal
from tailrace.lab.verification.journaled import Journaled
from tailrace.policies.families.racing import FastestOfN, MethodProfile
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import StartChunk

RECORDED = Path(__file__).parents[1] / "data" / "journal.jsonl.gz"
CHUNKED = {"chunking": {"type": "fixed", "chunk_tokens": 10}, "placement": "round_robin"}


def played(samples: int, rounds: int, **policies) -> Journaled:
    """One group, each chunk of 10 tokens with 6 drafts of which 3 are right; the samples stop in the last round."""
    core = JournaledCore(Policies(**policies))
    for name in "ab":
        core.observe(ev.ReplicaJoined(0.0, name, 16, 100, 4, 0, 0, "n", ("group", "history")))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, samples, 100),)))
    for number in range(1, rounds + 1):
        end = ev.ChunkEnd.STOP if number == rounds else ev.ChunkEnd.LENGTH
        drafts = {"drafted_tokens": 6, "accepted_tokens": 3}
        for start in core.decide(ev.Tick(float(number))):
            if isinstance(start, StartChunk) and start.copy_of is None:
                core.observe(ev.ChunkFinished(float(number), start.chunk_id, 10, end, 0, **drafts))
    return Journaled(core.journal())


def test_samples_of_several_chunks_and_replicas_are_counted():
    assert played(3, 3, **CHUNKED).counts() == {
        "chunked_share": 1.0,
        "moved_samples": 3,
        "drafted_tokens": 54,
        "accepted_share": 0.5,
    }
    assert played(3, 1, **CHUNKED).counts()["chunked_share"] == played(3, 1, **CHUNKED).counts()["moved_samples"] == 0
    pinned = played(3, 3, **(CHUNKED | {"placement": "pinned"})).counts()
    assert (pinned["chunked_share"], pinned["moved_samples"]) == (1.0, 0)


def test_an_empty_journal_has_zeros():
    nothing = Journaled(JournaledCore(Policies()).journal())
    assert nothing.races == 0 and not any(nothing.counts().values())


def test_copies_are_races():
    rungs = tuple(MethodProfile(name, ((0.0, 1.0), (1.0, 4.0)), (0.5,)) for name in ("group", "history"))
    raced = played(1, 1, **CHUNKED, racing=FastestOfN(room=3, rungs=rungs))
    assert raced.races == 1 and played(1, 1, **CHUNKED).races == 0


@pytest.fixture(scope="module")
def recorded() -> str:
    return gzip.decompress(RECORDED.read_bytes()).decode()


def test_a_recorded_run_is_counted_by_its_lines(recorded):
    entries = read_journal(recorded.splitlines()).entries
    starts = [one for entry in entries for one in getattr(entry, "actions", ()) if isinstance(one, StartChunk)]
    chunks = Counter(start.sample_id for start in starts)
    places = {(start.sample_id, start.replica_id) for start in starts}
    counts = Journaled(recorded).counts()
    assert counts["chunked_share"] == round(sum(count > 1 for count in chunks.values()) / len(chunks), 4) > 0
    assert len(places) - len(chunks) >= counts["moved_samples"] > 0 and counts["drafted_tokens"] > 0
