"""Features on the simulated cluster: an item is put into the object store once, and goes with the last prompt."""

import asyncio
import gc
from collections import Counter

from image_model import features
from virtual_cluster import play

from tailrace.deployments.engine.shared_features import ReferredFeatures
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

PROMPT = tuple(range(1, 41))


def test_an_item_is_put_once_for_all_chunks_and_dropped_with_its_groups(tmp_path):
    async def story(cluster, client):
        shared, put, sent = cluster.engine_client.features, Counter(), []
        keep, refer = shared._put, shared.referred
        shared._put = lambda given: put.update([given.name]) or keep(given)
        shared.referred = lambda chunk: sent.append(found := refer(chunk)) or found
        groups = [
            PromptGroup(prompt_id=name, token_ids=PROMPT, features=given, samples=4, max_tokens=60)
            for name, given in (("a", features((1, 3))), ("b", features((2, 3), (1, 9))), ("none", None))
        ]
        results = [one async for one in client.rollout(RolloutBatch(batch_id="b", groups=groups))]
        assert len(results) == 3 and sorted(put.values()) == [1, 1]
        assert all(chunk.features is None or isinstance(chunk.features, ReferredFeatures) for chunk in sent)
        by_name = Counter(one.name for chunk in sent for one in (chunk.features.data if chunk.features else ()))
        assert by_name.keys() == put.keys() and min(by_name.values()) > 4, "chunks carry references alone"
        async with client.open() as session:
            one = await session.generate(PROMPT, features=features((1, 3)), max_tokens=8)
            other = await session.generate(PROMPT, features=features((2, 3)), max_tokens=8)
            assert one.group != other.group and one.prompt_key != other.prompt_key
        await asyncio.sleep(100.0)  # idle groups of sessions are closed
        gc.collect()
        assert len(shared) == 0

    play(story, tmp_path, policies={"chunking": {"type": "fixed", "chunk_tokens": 16}})
