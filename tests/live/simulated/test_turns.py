"""Samples of several turns in open sessions, on the simulated cluster: their tokens, their KV and their ends."""

import asyncio
from itertools import pairwise
from random import Random

import pytest
from virtual_cluster import under_way

from simulated.test_sessions import PROMPT, play  # noqa: F401 - a fixture
from tailrace.app.calls.session import RolloutSession
from tailrace.deployments.messages.session import SampleAnswer
from tailrace.lab.fuzz.stepper import BLOCK_TOKENS, EOS
from tailrace.policies.core.length_tracker import LengthTracker
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import SampleEnd

TURNS = 4
TOOL = tuple(range(901, 908))
"""Tokens that a tool says between two turns."""

STAYS = {"placement": {"type": "cost_aware"}, "chunking": {"type": "fixed", "chunk_tokens": 16}}


async def trajectory(
    session: RolloutSession, index: int, hold_s: float = 30.0, tool_s: float = 1.0, most: int = 60
) -> list[SampleAnswer]:
    """All turns of a sample of the group `g`, a tool's answer between each two."""
    answers, context = [], PROMPT
    for turn in range(TURNS):
        held = hold_s if turn + 1 < TURNS else 0.0
        given = {"group": "g", "index": index, "turn": turn, "hold_s": held, "max_tokens": most}
        answer = await session.generate(context, **given)
        answers.append(answer)
        context = (*answer.prompt_token_ids, *answer.sample.token_ids, *TOOL)
        await asyncio.sleep(tool_s * (1 + index % 3))
    return answers


def tokens_of(trajectories: list[list[SampleAnswer]]) -> list[list[tuple[int, ...]]]:
    return [[answer.sample.token_ids for answer in answers] for answers in trajectories]


def recomputed(trajectories: list[list[SampleAnswer]]) -> tuple[int, int]:
    """Context tokens of later turns that an earlier turn had computed, and tokens that were computed again in them. The
    last token of a chunk is not computed before the next one."""
    old = again = 0
    for answers in trajectories:
        for before, after in pairwise(answers):
            known = len(before.prompt_token_ids) + len(before.sample.token_ids) - 1
            old += known
            again += after.sample.computed_tokens - (len(after.prompt_token_ids) - known) - (after.sample.chunks - 1)
    return old, again


def test_turns_have_the_same_tokens_held_or_not_and_in_any_order(play):  # noqa: F811 - a fixture
    async def story(cluster, client):
        async with client.open(seed=1) as session:
            held = await asyncio.gather(*(trajectory(session, index) for index in range(6)))
        async with client.open(seed=1) as session:
            alone = [await trajectory(session, index, hold_s=0.0, tool_s=0.0) for index in reversed(range(6))]
        assert tokens_of(held) == tokens_of(alone[::-1])
        turns = [tokens for answers in tokens_of(held) for tokens in answers]
        assert len({tokens[:8] for tokens in turns if len(tokens) >= 8}) == len([t for t in turns if len(t) >= 8])

    play(story, policies=STAYS)


def test_a_branch_takes_the_place_of_the_turns_that_it_follows(play):  # noqa: F811
    """With KV for one trajectory: another one begins after its branch, not before."""
    policies = STAYS | {"trajectories": {"type": "by_kv", "full_share": 1e-6, "give_up_from": 1e9}}

    async def story(cluster, client):
        async with client.open() as session:
            await session.generate(PROMPT, group="g", index=0, turn=0, max_tokens=20, hold_s=60.0)
            other = asyncio.ensure_future(session.generate(PROMPT, group="g", index=1, max_tokens=20, hold_s=60.0))
            await asyncio.sleep(1.0)
            core = cluster.coordinator.rollouts.core
            waiting = [one for one in core.samples() if core.awaited.by(one) == "KV of trajectories that began before"]
            assert len(waiting) == 1 and not other.done()
            await session.generate((*PROMPT[:-1], 77), group="g", index=0, turn=1, max_tokens=20)
            assert not other.done()
            assert (await other).sample.token_ids

    play(story, policies=policies)


def test_a_branch_reads_the_beginning_of_a_line_that_ends_while_it_waits(play):  # noqa: F811
    """Other samples fill both replicas. The line has given its KV back by the time that the branch may start."""
    pulls = {"type": "cost_aware", "pull_from_tokens": 1}
    policies = {"placement": pulls, "chunking": {"type": "fixed", "chunk_tokens": 512}}

    async def story(cluster, client):
        async with client.open() as session:
            line = await session.generate(PROMPT, group="g", index=0, turn=0, max_tokens=200, hold_s=60.0)
            fill = [session.generate(PROMPT, group="busy", index=index, max_tokens=480) for index in range(4)]
            filled = asyncio.gather(*fill)
            await asyncio.sleep(1.0)
            begins = (*PROMPT, *line.sample.token_ids[:150])
            given = {"group": "g", "index": 0, "turn": 1, "max_tokens": 200}
            branch = asyncio.ensure_future(session.generate((*begins, 77), **given))
            await asyncio.sleep(3.0)
            assert not branch.done()
            for replica in cluster.replicas.values():
                replica.stepper._blocks.clear()
            found = (await branch).sample
            assert found.chunks == 1 and found.cached_tokens == len(begins) // BLOCK_TOKENS * BLOCK_TOKENS
            await filled
            await asyncio.sleep(3.0)
            assert not cluster.master.keys, "nobody reads them any more"

    play(story, mean_tokens=10_000, pooled=True, kv_capacity_blocks=64, policies=policies)


def test_two_turns_of_one_number_are_the_turn_in_one(play):  # noqa: F811
    """A turn that is split has the tokens of the whole: the key is that of its number."""

    async def story(cluster, client):
        async with client.open() as session:
            whole = await session.generate(PROMPT, group="g", index=1, turn=2, max_tokens=40)
            given = {"group": "g", "index": 1, "turn": 2}
            first = await session.generate(PROMPT, **given, max_tokens=13, hold_s=5.0)
            context = (*PROMPT, *first.sample.token_ids)
            then = await session.generate(context, **given, max_tokens=27)
        assert first.sample.token_ids + then.sample.token_ids == whole.sample.token_ids
        assert then.prompt_token_ids == context and then.sample.segments[0].start == 0

    play(story, mean_tokens=10_000, policies=STAYS)


def test_held_turns_compute_little_again_and_others_much(play):  # noqa: F811
    async def story(cluster, client):
        async with client.open(seed=2) as session:
            held = await asyncio.gather(*(trajectory(session, index, most=80) for index in range(8)))
        await asyncio.sleep(10.0)  # the pool is swept
        async with client.open(seed=2) as session:
            given = {"hold_s": 0.0, "tool_s": 0.0, "most": 80}
            alone = await asyncio.gather(*(trajectory(session, index, **given) for index in range(8)))
        old, again = recomputed(held)
        chunks = sum(answer.sample.chunks for answers in held for answer in answers[1:])
        assert old > 2_000 and 0 < again < chunks * BLOCK_TOKENS, "no more than the last block of each chunk"
        assert tokens_of(alone) == tokens_of(held) and recomputed(alone)[1] > again
        assert {answer.sample.token_ids[-1] == EOS for answers in held for answer in answers} == {True, False}

    play(story, pooled=True, policies=STAYS)


def test_the_core_holds_a_sample_for_its_time_and_no_longer(play):  # noqa: F811
    async def story(cluster, client):
        async with client.open() as session:
            answer = await session.generate(PROMPT, group="g", index=0, max_tokens=20, hold_s=5.0)
            assert cluster.coordinator.rollouts.books()["held"] == 1
            await asyncio.sleep(6.0)
            assert cluster.coordinator.rollouts.books()["held"] == 0
            context = (*PROMPT, *answer.sample.token_ids, *TOOL)
            late = await session.generate(context, group="g", index=0, turn=1, max_tokens=20)
            again = await session.generate(context, group="g", index=0, turn=1, max_tokens=20)
        assert late.sample.token_ids == again.sample.token_ids and late.prompt_token_ids == context

    play(story, pooled=True)


@pytest.mark.parametrize("how", ["cancelled", "another context", "other rules", "the session ends"])
def test_a_held_sample_ends_when_it_is_not_continued(play, how):  # noqa: F811
    async def story(cluster, client):
        books = cluster.coordinator.rollouts.books
        async with client.open() as session:
            answer = await session.generate(PROMPT, group="g", index=3, max_tokens=20, hold_s=3_000.0)
            assert books()["held"] == 1
            context = (*PROMPT, *answer.sample.token_ids, *TOOL)
            if how == "cancelled":
                assert await session.cancel("g", 3) == 0
            elif how == "another context":
                await session.generate((9, *context), group="g", index=3, turn=1)
            elif how == "other rules":
                await session.generate(context, group="g", index=3, turn=1, sampling={"temperature": 0.5})
            else:
                await session.close()
            if how in ("another context", "other rules"):
                (status,) = cluster.coordinator.rollouts.status().batches
                assert status.samples == 2, "a request that continues none is a sample of its own"
            await asyncio.sleep(1.0)
            assert books()["held"] == 0

    async def whole(cluster, client):
        await client.status()
        await story(cluster, client)

    play(whole, pooled=True)


def test_a_change_of_policies_does_not_wait_for_held_samples(play):  # noqa: F811
    async def story(cluster, client):
        async with client.open() as session:
            first = await session.generate(PROMPT, group="g", index=0, max_tokens=20, hold_s=3_000.0)
            await client.set_policies(Policies(ordering="fcfs"))
            context = (*PROMPT, *first.sample.token_ids, *TOOL)
            then = await session.generate(context, group="g", index=0, turn=1, max_tokens=20)
        assert then.prompt_token_ids == context
        assert cluster.coordinator.rollouts.status().policies["ordering"]["type"] == "fcfs"

    play(story)


def test_an_error_of_the_core_as_a_turn_begins_makes_it_a_new_context(play, monkeypatch):  # noqa: F811
    async def story(cluster, client):
        async with client.open() as session:
            first = await session.generate(PROMPT, group="g", index=0, max_tokens=20, hold_s=30.0)
            context = (*PROMPT, *first.sample.token_ids, *TOOL)
            with monkeypatch.context() as patch:
                patch.setattr(LengthTracker, "begin_turn", lambda *_: 1 / 0)
                then = await session.generate(context, group="g", index=0, turn=1, max_tokens=20)
            assert then.prompt_token_ids == context and cluster.coordinator.rollouts.books()["held"] == 0
            assert cluster.coordinator.rollouts.status().contained == {"submit.ZeroDivisionError": 1}

    play(story)


def test_turns_outlive_replicas_and_the_coordinator(play):  # noqa: F811
    async def story(cluster, client):
        async with client.open(seed=5) as session:
            running = asyncio.gather(*(trajectory(session, index) for index in range(6)))
            for kill in (lambda: cluster.kill(sorted(cluster.replicas)[0]), cluster.kill_coordinator):
                await asyncio.sleep(5.0 + Random(3).random())
                kill()
            disturbed = await running
        async with client.open(seed=5) as session:
            quiet = await asyncio.gather(*(trajectory(session, index) for index in range(6)))
        assert tokens_of(disturbed) == tokens_of(quiet)

    play(story, pooled=True, policies=STAYS)


@pytest.mark.parametrize(
    ("request_of", "reason"), [({"turn": -1}, "turn"), ({"hold_s": -1.0}, "hold_s"), ({"hold_s": 1e6}, "hold_s")]
)
def test_bad_turns_are_refused_before_they_are_sent(play, request_of, reason):  # noqa: F811
    async def story(cluster, client):
        async with client.open() as session:
            with pytest.raises(ValueError, match=reason):
                session.submit(PROMPT, **request_of)

    play(story)


def test_the_end_of_a_held_sample_does_not_cut_a_turn_that_comes_at_the_same_instant(play):  # noqa: F811
    """A request with another prompt ends the held sample; one that would have continued it is made anew, and whole."""

    async def story(cluster, client):
        session = client.open("s", seed=7)
        name = {"group": "g", "index": 0, "max_tokens": 4}
        first = await session.generate(PROMPT, **name, hold_s=30.0)
        assert first.sample.finish_reason is SampleEnd.LENGTH
        context = (*first.prompt_token_ids, *first.sample.token_ids)
        asks = [((*PROMPT, 5), 2), (context, 1)]
        calls = [asyncio.ensure_future(session.generate(prompt, **name, turn=turn)) for prompt, turn in asks]
        answers = await asyncio.gather(*calls)
        assert [answer.sample.finish_reason for answer in answers] == [SampleEnd.LENGTH] * 2
        await session.close()

    play(story, contexts=False)


def test_updates_between_a_turn_s_tokens_and_its_end_are_counted_for_every_turn(play):  # noqa: F811
    async def story(cluster, client):
        cluster.disk.folders |= {"one": "one", "two": "two"}
        async with client.open(seed=1) as session:
            asked = {"group": "g", "index": 0, "max_tokens": 200}
            first = await under_way(cluster, session.generate(PROMPT, hold_s=30.0, **asked))
            await client.update_weights(1, "one")
            answer = await first
            older = sum(one.end - one.start for one in answer.sample.segments if one.weights_version == 0)
            assert older > 0 and cluster.coordinator.rollouts.totals.updates == older
            await client.update_weights(2, "two")  # between two turns
            context = (*answer.prompt_token_ids, *answer.sample.token_ids, *TOOL)
            await session.generate(context, turn=1, hold_s=5.0, **asked)
            await asyncio.sleep(10.0)
        assert cluster.coordinator.rollouts.totals.updates == older

    play(story, policies=STAYS, mean_tokens=10_000)
