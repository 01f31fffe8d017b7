"""The whole service on two replicas: laws that only the real thing can show."""

import asyncio
import json

import pytest

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import RolloutRejected
from tailrace.app.files.prompts import read_prompts
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, SampleResult
from tailrace.lab.demo import PROMPTS
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import SampleEnd

CHUNKS = {"type": "fixed", "chunk_tokens": 24}


@pytest.fixture(scope="module")
def groups():
    return tuple(read_prompts(PROMPTS, {"samples": 4, "max_tokens": 64}))[:4]


def run(work):
    """A test that waits for ever says nothing."""
    return asyncio.run(asyncio.wait_for(work, 900))


async def roll(client: RolloutClient, batch: RolloutBatch, policies: Policies | None = None):
    await client.set_policies(policies or Policies(chunking=CHUNKS))
    return {group.prompt_id: group async for group in client.rollout(batch)}


def samples_of(groups) -> list[SampleResult]:
    return [sample for group in groups.values() for sample in group.samples]


def test_chunks_moves_and_the_blocking_twin_change_no_token(client, groups):
    whole = run(roll(client, RolloutBatch(batch_id="whole", groups=groups), Policies(placement="pinned")))
    moving = Policies(placement="round_robin", chunking=CHUNKS)
    moved = run(roll(client, RolloutBatch(batch_id="moved", groups=groups), moving))
    one = RolloutBatch(batch_id="blocking", groups=groups[:1])
    blocking = {group.prompt_id: group for group in client.rollout_blocking(one)}
    assert {sample.chunks for sample in samples_of(whole)} == {1}
    assert any(len({s.replica_id for s in sample.segments}) == 2 for sample in samples_of(moved))
    for prompt_id, group in whole.items():
        for other in (moved[prompt_id], blocking.get(prompt_id, group)):
            assert [s.token_ids for s in group.samples] == [s.token_ids for s in other.samples]
            for mine, theirs in zip(group.samples, other.samples, strict=True):
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
                assert mine.raw_logprobs == pytest.approx(theirs.raw_logprobs, abs=1e-4)


def test_results_are_complete(client, groups):
    rolled = run(roll(client, RolloutBatch(batch_id="complete", groups=groups[:2])))
    assert set(rolled) == {group.prompt_id for group in groups[:2]}
    for sample in samples_of(rolled):
        count = len(sample.token_ids)
        assert 1 <= count <= 64 and sample.text
        assert sample.finish_reason in (SampleEnd.STOP, SampleEnd.LENGTH)
        assert (sample.finish_reason is SampleEnd.LENGTH) <= (count == 64)
        assert len(sample.logprobs) == len(sample.raw_logprobs) == count
        assert [s.start for s in sample.segments] == [0, *(s.end for s in sample.segments[:-1])]
        assert sample.segments[-1].end == count
        assert 0 < sample.timings.started_s < sample.timings.finished_s or sample.timings.started_s == 0.0
        assert sample.logprobs == pytest.approx(sample.raw_logprobs, abs=1e-4), "temperature 1 and no filter"


def test_every_way_of_sampling_is_taken(client, groups):
    ways = ({"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.2}, {"temperature": 0.6, "top_p": 0.9})
    batch = RolloutBatch(
        batch_id="ways",
        groups=tuple(
            PromptGroup(prompt_id=str(i), text="Once upon a time", samples=2, max_tokens=16, sampling=way)
            for i, way in enumerate(ways)
        ),
    )
    rolled = run(roll(client, batch))
    greedy = rolled["0"].samples
    assert greedy[0].token_ids == greedy[1].token_ids and set(greedy[0].logprobs) == {0.0}
    assert all(sample.logprobs[i] >= sample.raw_logprobs[i] - 1e-4 for sample in rolled["2"].samples for i in range(2))


def test_replayed_tokens_come_out_and_end(client):
    forced = ((100, 200, 300, 400), tuple(range(1000, 1050)))
    group = PromptGroup(prompt_id="r", text="replay", samples=2, max_tokens=64, forced_token_ids=forced)
    rolled = run(roll(client, RolloutBatch(batch_id="replay", groups=(group,))))
    for sample, tokens in zip(rolled["r"].samples, forced, strict=True):
        assert sample.token_ids[:-1] == tokens and sample.finish_reason is SampleEnd.STOP
        assert all(logprob < 0 for logprob in sample.raw_logprobs)


def test_the_oracle_is_refused_without_a_replay(client, groups):
    oracle = Policies(ordering="oracle_longest_first", chunking=CHUNKS)
    with pytest.raises(RolloutRejected, match="oracle_longest_first"):
        run(roll(client, RolloutBatch(batch_id="no-oracle", groups=groups), oracle))
    group = PromptGroup(prompt_id="r", text="replay", samples=1, max_tokens=9, forced_token_ids=((5, 6, 7),))
    rolled = run(roll(client, RolloutBatch(batch_id="oracle", groups=(group,)), oracle))
    assert rolled["r"].samples[0].token_ids[:3] == (5, 6, 7)


def test_a_prompt_beyond_the_context_is_refused_by_name(client):
    group = PromptGroup(prompt_id="long", token_ids=(1,) * 5000)
    with pytest.raises(
        RolloutRejected,
        match=r"prompt 'long': .* maximum context length is 4096 tokens, .* 5000",
    ):
        run(roll(client, RolloutBatch(batch_id="long", groups=(group,))))


def test_cancel_hands_out_what_there_is(client, groups):
    first, *others = groups
    mixed = first.model_copy(update={"max_tokens": 8}), *(g.model_copy(update={"max_tokens": 2000}) for g in others)

    async def cancelled():
        await client.set_policies(Policies(chunking=CHUNKS))
        batch = RolloutBatch(batch_id="cancel", groups=mixed)
        stream = client.rollout(batch)
        rolled = [await anext(stream)]
        assert await client.cancel("cancel")
        return rolled + [group async for group in stream]

    rolled = run(cancelled())
    assert len(rolled) == len(groups)
    ends = [sample.finish_reason for group in rolled for sample in group.samples]
    assert SampleEnd.CANCELLED in ends
    assert not run(client.cancel("cancel")), "it is over"


def test_vllm_never_preempts(client):
    status = run(client.status())
    assert len(status.replicas) == 2
    assert [replica.preemptions for replica in status.replicas] == [0, 0]


def test_every_span_has_its_parent(client, groups):
    async def traced():
        batch = RolloutBatch(batch_id="traced", groups=groups[:2], keep_trace=True)
        await roll(client, batch)
        return await client.take_trace("traced")

    spans = run(traced())
    json.dumps(spans)
    by_id = {span["span_id"]: span for span in spans}
    assert len({span["trace_id"] for span in spans}) == 1
    chunk = next(span["name"] for span in spans if span["name"].startswith("text_completion "))
    above = {"rollout": "driver", "group": "rollout", chunk: "group", "engine": chunk}
    for span in spans:
        if span["name"] == "driver":
            assert span["parent_id"] is None
        else:
            assert by_id[span["parent_id"]]["name"] == above[span["name"]]
    count = {name: sum(span["name"] == name for span in spans) for name in ("driver", "rollout", "group")}
    assert count == {"driver": 1, "rollout": 1, "group": 2}
    chunks = [span for span in spans if span["name"] == chunk]
    engines = [span for span in spans if span["name"] == "engine"]
    assert len(chunks) == len(engines) >= 8
    for span in chunks:
        sample_id, _, number = span["attributes"]["tailrace.chunk.id"].rpartition(":")
        sample_group = sample_id.split("/")[1].rpartition("#")[0]
        assert by_id[span["parent_id"]]["attributes"]["tailrace.prompt.id"] == sample_group
        before = [by_id[link["span_id"]]["attributes"] for link in span["links"]]
        assert [one["tailrace.chunk.id"] for one in before] == [f"{sample_id}:{int(number) - 1}"] * (number != "0")
        made = [one["tailrace.chunk.start"] + one["gen_ai.usage.output_tokens"] for one in before]
        assert made == [span["attributes"]["tailrace.chunk.start"]] * (number != "0")
    for span in engines:
        queue, prefill, decode = span["events"]
        assert (queue["name"], prefill["name"], decode["name"]) == ("queue", "prefill", "decode")
        assert queue["unix_ns"] <= prefill["unix_ns"] <= decode["unix_ns"] <= span["end_unix_ns"]
        made = span["attributes"]["tailrace.chunk.new_tokens"]
        assert decode["attributes"] == {"tailrace.tokens": made, "tailrace.weights.version": 0}
        assert prefill["attributes"]["tailrace.tokens"] >= 1 and made >= 1
        assert by_id[span["parent_id"]]["attributes"]["gen_ai.usage.output_tokens"] == made
