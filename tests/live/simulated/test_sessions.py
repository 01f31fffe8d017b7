"""Open sessions on the simulated cluster: single samples, in any order, with the tokens of a batch."""

import asyncio
from contextlib import aclosing, nullcontext
from functools import partial
from random import Random

import pytest

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import QuotaExceeded, RolloutRejected, StreamBroken, TooLargeForQuota
from tailrace.app.calls.session import groups_of_answers
from tailrace.deployments.batches import open_batch, open_sessions
from tailrace.deployments.batches.open_batch import MAX_GROUP_SAMPLES
from tailrace.deployments.batches.quotas import Quotas
from tailrace.deployments.messages.liveness import LEASE_S
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.messages.session import STREAM_CHUNK_TOKENS
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import SampleEnd

PROMPT = (5, 6, 7)


@pytest.fixture
def play(play):
    """With short samples."""
    return partial(play, mean_tokens=60)


def tokens_of(groups) -> dict[str, list[tuple[int, ...]]]:
    return {group.prompt_id: [sample.token_ids for sample in group.samples] for group in groups}


async def whole_batch(client: RolloutClient, batch: RolloutBatch) -> dict:
    return tokens_of([group async for group in client.rollout(batch)])


def test_a_score_has_a_logprob_for_each_token_but_the_first_and_a_batch_gives_none(play):
    async def story(cluster, client):
        async with client.open() as session:
            scored = await session.score((5, 6, 7, 8))
            answer = await session.generate((5, 6, 7, 8), max_tokens=8)
        assert scored.prompt.logprobs == (-1, -2, -3) and scored.weights_version == 0 and scored.weights_digest
        assert answer.sample.prompt_logprobs is None
        asked = PromptGroup(prompt_id="p", token_ids=(1, 2), sampling={"prompt_logprobs": 0})
        with pytest.raises(ValueError, match="prompt 'p': top_logprobs, prompt_logprobs and sampling_mask come in"):
            RolloutBatch(batch_id="b", groups=(asked,))

    play(story)


def test_single_samples_have_the_tokens_of_a_batch(play):
    groups = tuple(PromptGroup(prompt_id=f"p{n}", token_ids=(n + 1, 2), samples=4, max_tokens=90) for n in range(4))
    batch = RolloutBatch(batch_id="b", groups=groups, seed=3, step=2)

    async def story(cluster, client):
        expected = await whole_batch(client, batch)
        wanted = [(group, index) for group in groups for index in range(group.samples)]
        Random(1).shuffle(wanted)
        async with client.open(seed=3, step=2) as session:
            for group, index in wanted:
                session.submit(group.token_ids, group=group.prompt_id, index=index, max_tokens=90)
                await asyncio.sleep(0.3)
            answers = [answer async for answer in session.samples()]
        assert tokens_of(groups_of_answers(answers).values()) == expected
        assert {answer.step for answer in answers} == {2} and len({answer.prompt_key for answer in answers}) == 4

    play(story)


def test_requests_of_equal_prompts_are_numbered_in_one_group(play):
    async def story(cluster, client):
        async with client.open() as session:
            for _ in range(3):
                session.submit(PROMPT, max_tokens=40)
            answers = [answer async for answer in session.samples()]
        assert {answer.sample.sample_index for answer in answers} == {0, 1, 2}
        assert len({answer.group for answer in answers}) == 1
        assert len({answer.sample.token_ids for answer in answers}) == 3

    play(story)


def test_a_name_with_several_prompts_has_a_group_for_each(play):
    async def story(cluster, client):
        async with client.open() as session:
            one, other = await asyncio.gather(
                session.generate(PROMPT, group="g", index=0), session.generate((9, 9), group="g", index=0)
            )
        assert (one.prompt_token_ids, other.prompt_token_ids) == (PROMPT, (9, 9))
        assert one.group == other.group == "g"

    play(story)


def test_a_request_made_twice_is_made_once(play):
    async def story(cluster, client):
        async with client.open() as session:
            same = [session.generate(PROMPT, group="g", index=4, max_tokens=50) for _ in range(2)]
            one, other = await asyncio.gather(*same)
            (status,) = cluster.coordinator.rollouts.status().batches
        assert one == other and status.samples == 1

    play(story)


def test_samples_of_a_group_whose_number_is_known_are_one_group_which_then_is_closed(play):
    async def story(cluster, client):
        async with client.open() as session:
            asked = [
                asyncio.ensure_future(session.generate(PROMPT, group="g", index=n, of=2, max_tokens=60)) for n in (0, 1)
            ]
            for _ in range(100):
                await asyncio.sleep(0.05)
                if cluster.coordinator.rollouts.books()["running"] == 2:
                    break
            assert cluster.coordinator.rollouts.books()["samples_and_groups"] == 2 + 1
            await asyncio.gather(*asked)
            await asyncio.sleep(1.0)
            assert cluster.coordinator.rollouts.books()["samples_and_groups"] == 0, "nobody waits for a third one"

    play(story, mean_tokens=4_000)


def test_a_sample_past_its_deadline_ends_with_its_tokens_so_far(play):
    async def story(cluster, client):
        async with client.open() as session:
            late = asyncio.ensure_future(session.generate(PROMPT, group="g", max_tokens=2_000, deadline_s=4.0))
            whole = await session.generate(PROMPT, group="g", max_tokens=2_000)
            ended = await late
        assert whole.sample.finish_reason is not SampleEnd.CANCELLED
        assert ended.sample.finish_reason is SampleEnd.CANCELLED and 0 < len(ended.sample.token_ids) < 2_000

    play(story, mean_tokens=900)


@pytest.mark.parametrize("gap_s", [0.0, 1e-6, 1e-3, 0.02, 0.5])
def test_a_cancel_counts_from_the_first_moment_on(play, gap_s):
    """Also before the core knows the sample."""

    async def story(cluster, client):
        async with client.open() as session:
            await session.generate(PROMPT, group="other", max_tokens=1)
            asked = asyncio.ensure_future(session.generate(PROMPT, group="g", index=0, max_tokens=2_000))
            await asyncio.sleep(gap_s)
            while not await session.cancel("g", 0):
                await asyncio.sleep(0)
            cut = (await asked).sample
        assert cut.finish_reason is SampleEnd.CANCELLED and len(cut.token_ids) < 100

    play(story, mean_tokens=4_000)


@pytest.mark.parametrize("deadline_s", [1e-9, 1e-6, 0.05])
def test_a_deadline_may_pass_before_the_core_knows_the_sample(play, deadline_s):
    async def story(cluster, client):
        async with client.open() as session:
            cut = (await session.generate(PROMPT, group="g", max_tokens=2_000, deadline_s=deadline_s)).sample
        assert cut.finish_reason is SampleEnd.CANCELLED and len(cut.token_ids) < 100

    play(story, mean_tokens=4_000)


def test_samples_are_cancelled_by_group_and_index(play):
    async def story(cluster, client):
        async with client.open() as session:
            for index in range(4):
                session.submit(PROMPT, group="gh"[index % 2], index=index, max_tokens=500)
            await asyncio.sleep(3.0)
            assert await session.cancel("g", 0) == 1
            assert await session.cancel("h") == 2
            ends = {one.sample.sample_index: one.sample.finish_reason async for one in session.samples()}
        assert {index for index, end in ends.items() if end is SampleEnd.CANCELLED} == {0, 1, 3}

    play(story, mean_tokens=400)


def test_a_caller_that_leaves_ends_its_sample_unless_another_waits_for_it(play):
    async def story(cluster, client):
        async with client.open() as session:
            asked = {"group": "g", "max_tokens": 500}
            left, shared, stays = (
                asyncio.ensure_future(session.generate(PROMPT, index=index, **asked)) for index in (0, 1, 1)
            )
            await asyncio.sleep(3.0)
            left.cancel()
            shared.cancel()
            answer = await stays
            assert answer.sample.finish_reason is not SampleEnd.CANCELLED
            assert cluster.coordinator.rollouts.books()["running"] == 0

    play(story, mean_tokens=300)


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.02, 0.1, 0.5, 2.0])
def test_a_request_that_is_given_up_and_made_again_gets_the_whole_answer(play, gap_s):
    async def story(cluster, client):
        async with client.open() as session:
            asked = {"group": "g", "index": 3, "max_tokens": 200}
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3.0):
                    await session.generate(PROMPT, **asked)
            await asyncio.sleep(gap_s)
            again = await session.generate(PROMPT, **asked)
        async with client.open(seed=0) as session:
            whole = await session.generate(PROMPT, **asked)
        assert again.sample.finish_reason is not SampleEnd.CANCELLED
        assert again.sample.token_ids == whole.sample.token_ids

    play(story, mean_tokens=400)


def test_a_cancelled_request_is_made_again_after_its_end(play):
    """Both callers of the first get it cut short; the one that asks while it ends gets it whole."""

    async def story(cluster, client):
        async with client.open() as session:
            asked = {"group": "g", "index": 0, "max_tokens": 300}
            first = [asyncio.ensure_future(session.generate(PROMPT, **asked)) for _ in range(2)]
            await asyncio.sleep(3.0)
            assert await session.cancel("g", 0) == 1
            again = await session.generate(PROMPT, **asked)
            cut = [one.sample for one in await asyncio.gather(*first)]
        assert {one.finish_reason for one in cut} == {SampleEnd.CANCELLED}
        assert again.sample.finish_reason is not SampleEnd.CANCELLED
        assert again.sample.token_ids[: len(cut[0].token_ids)] == cut[0].token_ids

    play(story, mean_tokens=400)


def test_a_session_whose_driver_is_gone_is_closed(play):
    async def story(cluster, client):
        session = client.open("gone")
        task = asyncio.ensure_future(session.generate(PROMPT, max_tokens=10_000))
        await asyncio.sleep(3.0)
        session._heartbeat.stop()
        assert (await task).sample.finish_reason is SampleEnd.CANCELLED
        assert cluster.coordinator.rollouts.books()["sessions"] == 0

    play(story, mean_tokens=10_000, step_tokens=1, step_s=1.0)


def test_the_quotas_hold_for_sessions(play):
    async def story(cluster, client):
        await client.status()  # it is up
        cluster.coordinator.rollouts.deliveries.quotas = Quotas(max_samples=2)
        async with client.open("s") as session:
            for index in range(2):
                session.submit(PROMPT, index=index, max_tokens=400)
            await asyncio.sleep(1.0)
            with pytest.raises(QuotaExceeded, match=r"a sample of session 's' has 1 samples, those in flight have 2, "):
                await session.generate(PROMPT, index=2)
            group = PromptGroup(prompt_id="p", token_ids=(1,), samples=1)
            with pytest.raises(QuotaExceeded, match=r"try again when batch 's' has ended"):
                await whole_batch(client, RolloutBatch(batch_id="b", groups=(group,)))
            assert len([answer async for answer in session.samples()]) == 2
            with pytest.raises(
                TooLargeForQuota, match=r"batch 'b' has 3 samples, quotas.max_samples is 2; ask for fewer"
            ):
                group = PromptGroup(prompt_id="p", token_ids=(1,), samples=3)
                await whole_batch(client, RolloutBatch(batch_id="b", groups=(group,)))
            cluster.coordinator.rollouts.deliveries.quotas = Quotas(max_tokens=30)
            with pytest.raises(
                TooLargeForQuota, match=r"a sample of session 's' has 31 tokens, quotas.max_tokens is 30"
            ):
                await session.generate(PROMPT, index=2, max_tokens=31)

    play(story, mean_tokens=400)


def test_a_change_of_policies_comes_between_two_requests_of_an_open_session(play):
    async def story(cluster, client):
        async with client.open() as session:
            first = await session.generate(PROMPT, index=0, group="g")
            await client.set_policies(Policies(ordering="fcfs"))
            again, other = await asyncio.gather(*(session.generate(PROMPT, index=n, group="g") for n in (0, 1)))
        assert again.sample.token_ids == first.sample.token_ids != other.sample.token_ids
        assert cluster.coordinator.rollouts.status().policies["ordering"]["type"] == "fcfs"

    play(story)


def test_requests_outlive_the_coordinator(play):
    async def story(cluster, client):
        async with client.open() as session:
            for index in range(6):
                session.submit(PROMPT, group="g", index=index, max_tokens=300)
            await asyncio.sleep(4.0)
            cluster.kill_coordinator()
            answers = [answer async for answer in session.samples()]
            assert cluster.coordinators == 2
            alone = [await session.generate(PROMPT, group="g", index=n, max_tokens=300) for n in range(6)]
        made = {answer.sample.sample_index: answer.sample.token_ids for answer in answers}
        assert made == {answer.sample.sample_index: answer.sample.token_ids for answer in alone}

    play(story, mean_tokens=200)


def test_a_session_lives_while_its_driver_does(play):
    """Longer than a lease, in one request and between two; and by requests alone, without a heartbeat."""

    async def story(cluster, client):
        async with client.open("s") as session:
            answer = await session.generate(PROMPT, max_tokens=2 * int(LEASE_S))
            assert answer.sample.finish_reason is not SampleEnd.CANCELLED
            await asyncio.sleep(2 * LEASE_S)
            assert cluster.coordinator.rollouts.books()["sessions"] == 1
            (lives,) = cluster.coordinator.rollouts.sessions._sessions.values()
            session._heartbeat.stop()
            for _ in range(4):
                await asyncio.sleep(0.6 * LEASE_S)
                await session.generate(PROMPT, max_tokens=2)
                assert list(cluster.coordinator.rollouts.sessions._sessions.values()) == [lives], "it is the same one"
            await asyncio.sleep(LEASE_S + 10.0)
            assert cluster.coordinator.rollouts.books()["sessions"] == 0

    play(story, mean_tokens=10_000, step_tokens=1, step_s=1.0)


def test_a_group_is_open_while_one_of_its_samples_runs_and_answers_leave_nothing(play):
    async def story(cluster, client):
        async with client.open() as session:
            asked = {"group": "g", "max_tokens": 3 * int(open_sessions.IDLE_S)}
            first = asyncio.ensure_future(session.generate(PROMPT, index=0, **asked))
            await asyncio.sleep(2 * open_sessions.IDLE_S)
            await session.generate(PROMPT, index=1, **asked)
            await first
            (status,) = cluster.coordinator.rollouts.status().batches
            assert (status.groups, status.samples) == (1, 2)
            (one,) = cluster.coordinator.rollouts.sessions._sessions.values()
            assert one.batch._answered == {} == one.asked

    play(story, mean_tokens=10_000, step_tokens=1, step_s=1.0)


def test_a_group_has_a_bound(play):
    async def story(cluster, client):
        async with client.open() as session:
            for index in range(MAX_GROUP_SAMPLES + 5):
                session.submit(PROMPT, group="g", index=index, max_tokens=3)
            await asyncio.sleep(0.0)
            answers = [answer async for answer in session.samples()]
            (status,) = cluster.coordinator.rollouts.status().batches
        assert len(answers) == MAX_GROUP_SAMPLES + 5 and status.groups == 2

    play(story)


@pytest.mark.parametrize(
    ("request_of", "reason"),
    [
        ({"token_ids": (1,), "max_tokens": 0}, "max_tokens"),
        ({"token_ids": (1,), "text": "two"}, "exactly one of"),
        ({}, "exactly one of"),
        ({"token_ids": ()}, "token_ids is empty"),
        ({"token_ids": (1,), "deadline_s": 0}, "deadline_s"),
    ],
)
def test_bad_requests_are_refused_before_they_are_sent(play, request_of, reason):
    async def story(cluster, client):
        async with client.open() as session:
            with pytest.raises(ValueError, match=reason):
                session.submit(**request_of)

    play(story)


def test_one_name_has_one_seed(play):
    async def story(cluster, client):
        async with client.open("s", seed=1) as session:
            await session.generate(PROMPT, max_tokens=5)
            with pytest.raises(RolloutRejected, match="session 's' is open with another seed; give another batch_id"):
                await client.open("s", seed=2).generate(PROMPT, max_tokens=5)

    play(story)


def test_a_session_with_a_malformed_trace_is_refused_and_ends_no_batch(play):
    groups = (PromptGroup(prompt_id="p", token_ids=PROMPT, samples=2, max_tokens=60),)

    async def story(cluster, client):
        batch = asyncio.ensure_future(whole_batch(client, RolloutBatch(batch_id="b", groups=groups)))
        while not cluster.coordinator.rollouts.status().running:
            await asyncio.sleep(0.1)
        async with client.open("s", traceparent="x") as session:
            with pytest.raises(RolloutRejected, match="session 's': not a W3C traceparent: 'x'"):
                await session.generate(PROMPT, max_tokens=5)
        assert len((await batch)["p"]) == 2

    play(story)


def test_a_session_keeps_few_idle_groups(play, monkeypatch):
    monkeypatch.setattr(open_batch, "MAX_IDLE_GROUPS", 2)

    async def story(cluster, client):
        async with client.open() as session:
            for number in range(5):
                await session.generate((number + 1, 2), max_tokens=3)
            await asyncio.sleep(2.0)
            assert cluster.coordinator.rollouts.books()["samples_and_groups"] == 2
            assert cluster.coordinator.rollouts.books()["batches"] == 1
            await asyncio.sleep(open_sessions.IDLE_S)
            assert cluster.coordinator.rollouts.books()["batches"] == 0

    play(story)


def test_a_closed_session_takes_no_request(play):
    async def story(cluster, client):
        session = client.open("s")
        await session.close()
        with pytest.raises(ValueError, match="session 's' is closed; open another"):
            await session.generate(PROMPT)

    play(story)


async def streamed(session, **request) -> tuple[list, list[tuple[int, ...]]]:
    """The parts of a stream, and the tokens of each."""
    parts = [part async for part in session.stream(PROMPT, group="g", **request)]
    return parts, [part.token_ids for part in parts if part.token_ids]


def in_chunks(tokens: int) -> dict:
    return {"policies": {"chunking": {"type": "fixed", "chunk_tokens": tokens}}}


def test_a_stream_gives_the_tokens_of_the_sample_chunk_by_chunk(play):
    async def story(cluster, client):
        async with client.open() as session:
            answer = await session.generate(PROMPT, group="g", index=0, max_tokens=90)
            parts, pieces = await streamed(session, index=0, max_tokens=90)
        assert [len(piece) for piece in pieces[:-1]] == [20] * (len(pieces) - 1) and len(pieces) > 1
        assert sum(pieces, ()) == answer.sample.token_ids == parts[-1].answer.sample.token_ids
        assert sum((part.logprobs for part in parts), ()) == answer.sample.logprobs
        assert [part.prompt_token_ids for part in parts] == [PROMPT] + [None] * (len(parts) - 1)
        assert [part.answer is None for part in parts] == [True] * (len(parts) - 1) + [False]
        assert [part.start for part in parts[1:-1]] == [20 * n for n in range(len(pieces))]

    play(story, mean_tokens=80, **in_chunks(20))


def test_a_stream_has_small_chunks_of_its_own(play):
    async def story(cluster, client):
        async with client.open() as session:
            whole = await session.generate(PROMPT, group="g", index=0, max_tokens=90)
            small = {size: (await streamed(session, index=0, max_tokens=90, **size_of(size)))[1] for size in (None, 9)}
        assert whole.sample.chunks == 1
        for size, pieces in small.items():
            assert {len(piece) for piece in pieces[:-1]} == {size or STREAM_CHUNK_TOKENS}
            assert sum(pieces, ()) == whole.sample.token_ids

    def size_of(size: int | None) -> dict:
        return {} if size is None else {"chunk_tokens": size}

    play(story, mean_tokens=2_000)


def test_two_streams_and_a_call_of_one_sample_get_the_same_tokens(play):
    async def story(cluster, client):
        async with client.open() as session:
            one, other, answer = await asyncio.gather(
                streamed(session, index=1, max_tokens=90),
                streamed(session, index=1, max_tokens=90),
                session.generate(PROMPT, group="g", index=1, max_tokens=90),
            )
            (status,) = cluster.coordinator.rollouts.status().batches
        assert one[1] == other[1] and sum(one[1], ()) == answer.sample.token_ids and status.samples == 1

    play(story, mean_tokens=80, **in_chunks(20))


def test_a_stream_outlives_the_coordinator(play):
    async def story(cluster, client):
        async with client.open() as session:
            pieces = []
            async for part in session.stream(PROMPT, group="g", index=0, max_tokens=400):
                pieces.append(part.token_ids)
                if len(pieces) == 3:
                    cluster.kill_coordinator()
            assert cluster.coordinators == 2 and part.answer.sample.token_ids == sum(pieces, ())
            alone = await session.generate(PROMPT, group="g", index=0, max_tokens=400)
        assert sum(pieces, ()) == alone.sample.token_ids and len(pieces) > 5

    play(story, mean_tokens=2_000, **in_chunks(50))


def test_a_stream_breaks_rather_than_change_its_tokens(play):
    async def story(cluster, client):
        async with client.open() as session:
            with pytest.raises(StreamBroken, match="the weights have changed"):
                async for part in session.stream(PROMPT, group="g", index=0, max_tokens=400):
                    if part.start == 64:
                        cluster.disk.folders["w1"] = "content-1"
                        await client.update_weights(1, "w1")
                        cluster.kill_coordinator()

    play(story, mean_tokens=2_000, **in_chunks(50))


@pytest.mark.parametrize(("noise", "breaks"), [(1e-5, False), (0.5, True)])
def test_a_stream_at_law_continues_or_says_that_it_cannot(play, noise, breaks):
    """The sample is made again, with noise: from the same tokens on the stream continues, after others it breaks."""

    async def story(cluster, client):
        async with client.open("s") as session:
            pieces, expected = [], pytest.raises(StreamBroken, match="exactness law") if breaks else nullcontext()
            with expected:
                async for part in session.stream(PROMPT, group="g", index=0, max_tokens=400):
                    pieces.append(part.token_ids)
                    if len(pieces) == 3:
                        cluster.kill_coordinator()
            assert cluster.coordinators == 2 and (breaks or part.answer.sample.token_ids == sum(pieces, ()))
        assert (await client.status()).exactness == "law"

    play(story, mean_tokens=2_000, noise=noise, **in_chunks(50))


def test_a_reader_that_leaves_ends_its_sample(play):
    async def story(cluster, client):
        async with client.open() as session:
            async with aclosing(session.stream(PROMPT, group="g", max_tokens=10_000)) as parts:
                async for part in parts:
                    if part.token_ids:
                        break
            await asyncio.sleep(5.0)
            assert cluster.coordinator.rollouts.books()["running"] == 0

    play(story, mean_tokens=10_000, step_tokens=1, **in_chunks(20))


def test_a_stream_ends_at_its_deadline_and_is_refused_as_any_request(play):
    async def story(cluster, client):
        async with client.open() as session:
            parts, pieces = await streamed(session, max_tokens=400, deadline_s=4.0)
            assert parts[-1].answer.sample.finish_reason is SampleEnd.CANCELLED
            assert sum(pieces, ()) == parts[-1].answer.sample.token_ids
            with pytest.raises(RolloutRejected, match="maximum context length is 512 tokens"):
                await anext(session.stream(tuple(range(1, 600))))

    play(story, mean_tokens=5_000, step_tokens=1, **in_chunks(20))


def test_streams_have_the_tokens_of_a_batch_whatever_is_lost(play):
    group = PromptGroup(prompt_id="g", token_ids=PROMPT, samples=12, max_tokens=300)

    async def story(cluster, client):
        expected = await whole_batch(client, RolloutBatch(batch_id="b", groups=(group,), seed=3))
        rng = Random(5)

        async def read(session, index: int) -> tuple[int, ...]:
            await asyncio.sleep(rng.uniform(0.0, 5.0))
            _, pieces = await streamed(session, index=index, max_tokens=300, chunk_tokens=rng.randint(1, 60))
            return sum(pieces, ())

        async with client.open(seed=3) as session:
            reads = [asyncio.ensure_future(read(session, index)) for index in range(12)]
            for _ in range(4):
                await asyncio.sleep(rng.uniform(1.0, 8.0))
                cluster.kill(rng.choice(list(cluster.replicas)))
                await asyncio.sleep(rng.uniform(1.0, 8.0))
                cluster.kill_coordinator()
                while not cluster.replicas:
                    await asyncio.sleep(1.0)
            assert await asyncio.gather(*reads) == expected["g"] and cluster.coordinators > 2

    play(story, mean_tokens=250)
