"""The board over a simulated service, in virtual time: its stream, one sample, logs, a coordinator that is lost."""

import asyncio
import json

import httpx
import pytest
from virtual_cluster import play, play_gateway

from tailrace.app.board.routes import make_board
from tailrace.app.board.watcher import AWAY_S, Watcher
from tailrace.deployments.feed.deltas import fold
from tailrace.deployments.feed.feed import MAX_FOLLOWERS, STREAM_DELTAS
from tailrace.deployments.feed.survey import Survey
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RolloutBatch

pytestmark = pytest.mark.live


@pytest.fixture(autouse=True)
def _looks_that_cost_nothing(monkeypatch):
    """A look's cost is of this processor, and would delay the next one here, too: tests/deployments/test_feed.py."""
    monkeypatch.setattr("tailrace.deployments.feed.feed.LOOKS_SHARE", float("inf"))


def batch(name: str = "b", samples: int = 4, max_tokens: int = 400) -> RolloutBatch:
    group = PromptGroup(prompt_id="sky", token_ids=(5, 6, 7), samples=samples, max_tokens=max_tokens)
    return RolloutBatch(batch_id=name, groups=(group,))


async def rolled(client, wanted: RolloutBatch) -> list:
    return [group async for group in client.rollout(wanted)]


def lines_of(state) -> list[str]:
    return [row["text"] for row in state.get("news", {}).values()]


class Page:
    """Deltas folded as a browser does."""

    def __init__(self, watcher: Watcher):
        self.state, self.wholes, self.numbers = {}, 0, []
        self.task = asyncio.ensure_future(self._read(watcher))

    async def _read(self, watcher: Watcher) -> None:
        async for text in watcher.follow():
            delta = json.loads(text)
            self.wholes += delta["whole"]
            self.numbers.append(delta["number"])
            self.state = {} if delta["whole"] else self.state
            fold(self.state, delta["sections"])


def test_a_page_follows_a_batch_from_its_first_token_to_its_end(tmp_path):
    async def story(cluster, client):
        watcher = Watcher(lambda: client, always=True)
        page, tokens = Page(watcher), []
        await asyncio.sleep(3.0)
        rolling = asyncio.ensure_future(rolled(client, batch()))
        while not rolling.done() or "batch b is over" not in lines_of(page.state):
            tokens += [row["tokens"] for row in page.state.get("batches", {}).values() if row["name"] == "b"]
            await asyncio.sleep(0.5)
        assert tokens == sorted(tokens) and tokens[-1] > tokens[0]
        assert lines_of(page.state)[0] == "batch b: 4 samples came" and not page.state["samples"]
        assert page.wholes == 1 and page.numbers == list(range(page.numbers[0], page.numbers[-1] + 1))
        assert page.state == watcher._deltas.state, "all deltas together are the present state"
        page.task.cancel()
        watcher.end()

    play(story, tmp_path)


def test_a_stream_of_the_coordinator_is_bounded_and_continues_where_it_was(tmp_path):
    async def story(cluster, client):
        feed = cluster.coordinator.rollouts.feed
        first = [json.loads(item) async for item in feed.follow("", 0)]
        assert len(first) == STREAM_DELTAS and [one["whole"] for one in first] == [True] + [False] * (len(first) - 1)
        more = [json.loads(item) async for item in feed.follow(first[-1]["epoch"], first[-1]["number"])]
        assert [one["number"] for one in more] == [first[-1]["number"] + 1 + n for n in range(STREAM_DELTAS)]
        await asyncio.sleep(60.0)
        assert feed.followers == 0 and feed._deltas is None, "with no follower there are no looks"
        again = feed.follow(more[-1]["epoch"], more[-1]["number"])
        assert json.loads(await anext(again))["whole"], "its reader was away"
        await again.aclose()

    play(story, tmp_path)


def test_more_streams_than_there_may_be_are_refused(tmp_path):
    async def story(cluster, client):
        feed = cluster.coordinator.rollouts.feed
        streams = [feed.follow("", 0) for _ in range(MAX_FOLLOWERS + 1)]
        items = [await anext(stream) for stream in streams]
        assert isinstance(items[-1], Rejected) and not any(isinstance(item, Rejected) for item in items[:-1])
        for stream in streams:
            await stream.aclose()

    play(story, tmp_path)


def test_a_client_reads_on_over_the_ends_of_streams(tmp_path):
    async def story(cluster, client):
        items = client.watch()
        numbers = [(await anext(items))["number"] for _ in range(2 * STREAM_DELTAS + 5)]
        assert numbers == [numbers[0] + n for n in range(len(numbers))]
        await items.aclose()

    play(story, tmp_path)


def test_a_sample_shows_chunks_with_reasons_and_its_text_and_is_known_after_its_end(tmp_path):
    async def story(cluster, client):
        app = make_board(client)
        rolling = asyncio.ensure_future(rolled(client, batch(max_tokens=500)))
        while not (found := [one for one in (await client.status(10)).longest if one.chunks > 1]):
            await asyncio.sleep(0.2)
        name = found[0].sample_id
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            shown = (await http.get("/board/sample", params={"id": name})).json()
            same = (await http.get("/board/sample", params={"id": f"b/{name.partition('/')[2]}"})).json()
            assert same["sample_id"] == name == shown["sample_id"]
            (group,) = await rolling
            sample = group.samples[int(name.rpartition("#")[2])]
            done = [one for one in shown["chunks"] if one["end"]]
            made = sum(one["new_tokens"] for one in done)
            assert done and all(one["reason"] for one in shown["chunks"])
            whole = " ".join(map(str, sample.token_ids))
            assert whole.startswith(shown["text"]) and shown["text_tokens"] >= made > 0
            after = (await http.get("/board/sample", params={"id": name})).json()
            assert (after["state"], after["end"], after["text"]) == ("ended", sample.finish_reason, None)
            assert sum(one["new_tokens"] for one in after["chunks"]) == len(sample.token_ids) == after["tokens"]
            assert (await http.get("/board/sample", params={"id": "b/none#1"})).status_code == 204

    play(story, tmp_path, policies={"chunking": {"type": "fixed", "chunk_tokens": 16}})


def test_the_log_of_a_batch_adds_up_and_outlives_it(tmp_path):
    async def story(cluster, client):
        rolling = asyncio.ensure_future(rolled(client, batch("mine")))
        while not (log := await client.batch_log("mine")) or not log.chunks:
            await asyncio.sleep(0.2)
        assert log.status.batch_id == "mine" and sum(log.counts.values()) == 4
        (group,) = await rolling
        log = await client.batch_log("mine")
        assert log.status is None and sum(log.counts.values()) == len(log.samples) == 4
        assert log.chunks == sum(sample.chunks for sample in group.samples) == sum(len(s.chunks) for s in log.samples)
        assert await client.batch_log("other") is None and await client.sample_log("mine/sky#9") is None

    play(story, tmp_path)


def test_a_replica_that_is_lost_is_a_fault_of_its_chunks(tmp_path):
    async def story(cluster, client):
        page = Page(watcher := Watcher(lambda: client, always=True))
        rolling = asyncio.ensure_future(rolled(client, batch(max_tokens=500)))
        while len({row["replica"] for row in page.state.get("samples", {}).values()}) < 2:
            await asyncio.sleep(0.2)
        cluster.kill(next(iter(cluster.replicas)))
        await rolling
        await asyncio.sleep(2.0)
        log = await client.batch_log("b")
        lost = [one for sample in log.samples for one in sample.chunks if one.end == "lost"]
        assert lost and all(one.error for one in lost)
        assert any("it has left" in row["text"] for row in page.state["faults"].values())
        assert any("has left" in line for line in lines_of(page.state))
        page.task.cancel()
        watcher.end()

    play(story, tmp_path)


def test_a_lost_coordinator_is_shown_as_away_and_then_its_state_again(tmp_path):
    async def story(cluster, client):
        page, away = Page(watcher := Watcher(lambda: client, always=True)), []
        for second in range(int(20 + 4 * AWAY_S)):
            if second == 4:
                cluster.kill_coordinator(away_s=2 * AWAY_S)
            await asyncio.sleep(1.0)
            away.append(bool(page.state["board"]["away"]))
        assert not away[2] and True in away[4:] and not away[-1]
        assert len(page.state["replicas"]) == 2 and page.wholes == 1
        page.task.cancel()
        watcher.end()

    play(story, tmp_path)


def test_names_of_other_hosts_are_refused_and_the_page_fetches_nothing_else(tmp_path):
    async def story(cluster, client):
        app = make_board(client)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8280") as http:
            page = await http.get("/")
            assert page.status_code == 200 and "default-src 'none'; connect-src 'self'" in page.text
            assert "http://" not in page.text and "https://" not in page.text
            for path in ("/", "/board/stream", "/board/sample?id=x"):
                assert (await http.get(path, headers={"Host": "evil.example"})).status_code == 400

    play(story, tmp_path)


def test_the_gateway_serves_the_board_to_each_role_and_texts_to_those_that_roll_out(tmp_path):
    async def story(cluster, http):
        async with (
            http() as trainer,
            http(Role.EVALUATOR) as reader,
            http(Role.OBSERVER) as looker,
            http(None) as out,
        ):
            asking = trainer.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 400, "seed": 3})
            making = asyncio.ensure_future(asking)
            rollouts = cluster.coordinator.rollouts
            while not (found := rollouts.status(Survey(1)).longest):
                await asyncio.sleep(0.2)
            query = {"id": found[0].sample_id}
            assert (await out.get("/board")).headers["www-authenticate"].startswith("Basic ")
            assert (await out.get("/board/sample", params=query)).status_code == 401
            assert "www-authenticate" not in (await out.post("/pause")).headers
            assert "<title>Tailrace" in (await looker.get("/board")).text
            shown = (await looker.get("/board/sample", params=query)).json()
            assert shown["chunks"] and shown["text"] is None and "needs role evaluator" in shown["text_refused"]
            assert isinstance((await reader.get("/board/sample", params=query)).json()["text"], str)
            foreign = {"Origin": "http://evil.example"}
            assert (await trainer.post("/pause", headers=foreign)).status_code == 403
            assert not rollouts.status().paused
            made = await making
            assert made.status_code == 200 and made.json()["usage"]["completion_tokens"] == 400

    play_gateway(story, tmp_path, mean_tokens=4_000)
