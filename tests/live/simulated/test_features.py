"""Features on the simulated cluster: they are put into the object store once for each group, and go with it."""

import asyncio
import gc
from collections import Counter

from image_model import features
from virtual_cluster import play

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

PROMPT = tuple(range(1, 41))


def test_a_group_s_features_are_put_once_for_all_its_chunks_and_dropped_with_it(tmp_path):
    async def story(cluster, client):
        shared, put, sent = cluster.engine_client.features, Counter(), []
        keep, refer = shared._put, shared.referred
        shared._put = lambda given: put.update([given.name]) or keep(given)
        shared.referred = lambda chunk: sent.append(found := refer(chunk)) or found
        groups = [
            PromptGroup(prompt_id=name, token_ids=PROMPT, features=given, samples=4, max_tokens=60)
            for name, given in (("a", features((1, 3))), ("b", features((2, 3))), ("none", None))
        ]
        results = [one async for one in client.rollout(RolloutBatch(batch_id="b", groups=groups))]
        assert len(results) == 3 and sorted(put.values()) == [1, 1]
        by_name = Counter(chunk.features for chunk in sent)
        assert by_name.keys() == put.keys() and min(by_name.values()) > 4, "chunks carry references alone"
        async with client.open() as session:
            one = await session.generate(PROMPT, features=features((1, 3)), max_tokens=8)
            other = await session.generate(PROMPT, features=features((2, 3)), max_tokens=8)
            assert one.group != other.group and one.prompt_key != other.prompt_key
        await asyncio.sleep(100.0)  # idle groups of sessions are closed
        gc.collect()
        assert len(shared) == 0

    play(story, tmp_path, policies={"chunking": {"type": "fixed", "chunk_tokens": 16}})
