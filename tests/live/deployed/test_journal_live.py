"""A live run written down anew, and told to a fresh core: the same answers, one by one."""

import asyncio

from tailrace.deployments.coordinator.journal import read_journal, replay
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import StartChunk


def batch(name: str) -> RolloutBatch:
    forced = tuple(tuple(range(100, 110 + 9 * length)) for length in range(4))
    groups = (PromptGroup(prompt_id=p, text=p * 9, samples=4, max_tokens=64, forced_token_ids=forced) for p in "abc")
    return RolloutBatch(batch_id=name, groups=tuple(groups))


async def rolled(client, name: str) -> list:
    return [group async for group in client.rollout(batch(name))]


async def record(client) -> tuple[str | None, str | None, str | None]:
    """Before journals are switched on; with policies changed in between; and after."""
    first = await client.journal(True)
    await rolled(client, "one")
    await client.set_policies(Policies(ordering="remaining_first", chunking={"type": "fixed", "chunk_tokens": 16}))
    await rolled(client, "two")
    written = await client.journal(False)
    await rolled(client, "three")
    return first, written, await client.journal(False)


def test_what_a_live_core_was_told_is_answered_alike_again(client):
    before, written, after = asyncio.run(asyncio.wait_for(record(client), 900))
    assert before is None and after is None, "nothing is written down unless somebody asked for it"
    journal = read_journal(written.splitlines())
    assert journal.policies.ordering.type == "remaining_first" and journal.dropped == 0
    decisions = [action for entry in journal.entries for action in getattr(entry, "actions", ())]
    starts = [action for action in decisions if isinstance(action, StartChunk)]
    assert {start.sample_id.partition("~")[0] for start in starts} == {"two"}, "new policies begin a new journal"
    assert len(starts) > 12 and replay(journal) is None
