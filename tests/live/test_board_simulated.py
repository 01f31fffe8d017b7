"""The board over a simulated service, in virtual time: looks, news, one sample, a coordinator that is lost."""

import asyncio

import httpx
import pytest
from virtual_cluster import play

from tailrace.app.board.routes import make_board
from tailrace.app.board.watcher import AWAY_S, Watcher
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

pytestmark = pytest.mark.live


def batch(name: str = "b", samples: int = 4, max_tokens: int = 400) -> RolloutBatch:
    group = PromptGroup(prompt_id="sky", token_ids=(5, 6, 7), samples=samples, max_tokens=max_tokens)
    return RolloutBatch(batch_id=name, groups=(group,))


async def rolled(client, wanted: RolloutBatch) -> list:
    return [group async for group in client.rollout(wanted)]


def test_looks_follow_a_batch_from_its_first_token_to_its_end(tmp_path):
    async def story(cluster, client):
        watcher = Watcher(client, every_s=1.0)
        watching = asyncio.ensure_future(watcher.run())
        await asyncio.sleep(0.5)
        rolling = asyncio.ensure_future(rolled(client, batch()))
        seen = []
        async for look in watcher.looks():
            seen.append(look)
            if rolling.done() and any(one["text"] == "batch b is over" for one in look["news"]):
                break
        watching.cancel()
        running = [look for look in seen if look.get("longest")]
        assert running and all(look["batches"][0]["batch_id"] == "b" for look in running)
        tokens = [look["batches"][0]["tokens"] for look in running]
        assert tokens == sorted(tokens) and tokens[-1] > tokens[0]
        longest = [one["tokens"] for one in running[-1]["longest"]]
        assert longest == sorted(longest, reverse=True)
        assert len(seen[0]["moments"]) <= 1 and "moments" not in seen[1]
        assert [one["text"] for one in seen[-1]["news"]][:1] == ["batch b: 4 samples came"]

    play(story, tmp_path)


def test_a_sample_shows_its_chunks_and_its_text_until_it_has_ended(tmp_path):
    async def story(cluster, client):
        app = make_board(client, every_s=1.0)
        rolling = asyncio.ensure_future(rolled(client, batch(max_tokens=500)))
        while not (found := [one for one in await client.longest_samples() if one.chunks > 1]):
            await asyncio.sleep(0.2)
        name = found[0].sample_id
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            shown = (await http.get("/sample", params={"id": name})).json()
            (group,) = await rolling
            sample = group.samples[int(name.rpartition("#")[2])]
            assert shown["tokens"] == sum(part["end"] - part["start"] for part in shown["segments"]) > 0
            assert shown["text"] == " ".join(map(str, sample.token_ids[: shown["tokens"]]))
            assert (await http.get("/sample", params={"id": name})).status_code == 204

    play(story, tmp_path, policies={"chunking": {"type": "fixed", "chunk_tokens": 16}})


def test_a_lost_coordinator_is_shown_as_away_and_looks_go_on(tmp_path):
    async def story(cluster, client):
        watcher = Watcher(client, every_s=1.0)
        watching = asyncio.ensure_future(watcher.run())
        seen = []

        async def look():
            async for one in watcher.looks():
                seen.append(bool(one.get("away")))

        looking = asyncio.ensure_future(look())
        await asyncio.sleep(3.0)
        cluster.kill_coordinator(away_s=2 * AWAY_S)
        await asyncio.sleep(10.0 + 3 * AWAY_S)
        for task in (watching, looking):
            task.cancel()
        assert seen[-1] is False and True in seen[2:-1]

    play(story, tmp_path)


def test_names_of_other_hosts_are_refused_and_the_page_fetches_nothing_else(tmp_path):
    async def story(cluster, client):
        app = make_board(client, every_s=1.0)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            page = await http.get("/")
            assert page.status_code == 200 and "default-src 'none'; connect-src 'self'" in page.text
            assert "http://" not in page.text and "https://" not in page.text
            assert (await http.get("/", headers={"Host": "evil.example"})).status_code == 400

    play(story, tmp_path)
