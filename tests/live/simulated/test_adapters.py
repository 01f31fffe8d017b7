"""Adapters of LoRA on the simulated cluster: names and versions, moves, late replicas, lost coordinators, and HTTP."""

import asyncio

import pytest
from virtual_cluster import play, play_gateway, under_way

from tailrace.app.calls.refused import AdapterRejected, UnknownAdapter
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.lab.fuzz.disk import adapted, digest_of
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.token_law import token_at
from tailrace.policies.protocol.actions import SampleEnd

PROMPT = (5, 6, 7)
MOVES = {"placement": {"type": "round_robin"}, "chunking": {"type": "fixed", "chunk_tokens": 8}}
LONG = {"mean_tokens": 10_000, "policies": MOVES, "pooled": True}


def put(cluster, name: str, content: str | None = None) -> str:
    """Writes an adapter's folder on the cluster's disk. Returns its path."""
    cluster.disk.folders[f"/{name}"] = content or name
    return f"/{name}"


def expected(adapter: str, index: int, count: int, group: str = "g", weights: str = "start") -> tuple[int, ...]:
    """The tokens of an adapter's content; empty for the model alone."""
    key, content = sample_key(0, 0, group, index), adapted(weights, digest_of(adapter) if adapter else "")
    return tuple(token_at(key, content, len(PROMPT) + place, 10_000) for place in range(count))


def batch(*adapters: str | None, samples: int = 2, max_tokens: int = 60) -> RolloutBatch:
    groups = [
        PromptGroup(prompt_id=f"g-{one}", token_ids=PROMPT, samples=samples, max_tokens=max_tokens, adapter=one)
        for one in adapters
    ]
    return RolloutBatch(batch_id="b", groups=groups)


def test_groups_of_one_batch_have_the_tokens_of_their_adapters(tmp_path):
    async def story(cluster, client):
        for name in ("poet", "clerk"):
            loaded = await client.load_adapter(name, put(cluster, name))
            assert loaded == (name, 1, digest_of(name), f"/{name}")
        found = {group.prompt_id: group async for group in client.rollout(batch(None, "poet", "clerk", samples=3))}
        for name in ("", "poet", "clerk"):
            group = found[f"g-{name or None}"]
            for sample in group.samples:
                assert sample.token_ids == expected(name, sample.sample_index, 60, group.prompt_id)
                assert {part.adapter_digest for part in sample.segments} == {digest_of(name) if name else ""}
            assert any(len({part.replica_id for part in sample.segments}) == 2 for sample in group.samples), "one moved"
        assert [one.name for one in await client.adapters()] == ["clerk", "poet"]

    play(story, tmp_path, **LONG)


def test_another_content_is_the_next_version_and_samples_in_flight_keep_theirs(tmp_path):
    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet-1"))
        again = await client.load_adapter("poet", put(cluster, "copy", "poet-1"))
        assert again.version == 1, "the same content is the same version"
        asked = {"adapter": "poet", "group": "g", "max_tokens": 200}
        async with client.open() as session:
            before = await under_way(cluster, session.generate(PROMPT, index=0, **asked))
            assert (await client.load_adapter("poet", put(cluster, "poet-2"))).version == 2
            after = await session.generate(PROMPT, index=1, **asked)
            assert (await before).sample.token_ids == expected("poet-1", 0, 200)
            assert after.sample.token_ids == expected("poet-2", 1, 200)

    play(story, tmp_path, **LONG)


def test_a_turn_under_another_adapter_is_a_new_context(tmp_path):
    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet"))
        async with client.open() as session:
            asked = {"group": "g", "index": 0, "max_tokens": 20}
            first = await session.generate(PROMPT, hold_s=30.0, adapter="poet", **asked)
            context = (*PROMPT, *first.sample.token_ids)
            then = await session.generate(context, **asked)
        assert first.sample.token_ids == expected("poet", 0, 20)
        assert then.sample.token_ids == expected("", 0, 40)[20:]
        assert then.sample.computed_tokens >= len(context), "none of its KV was found"

    play(story, tmp_path, **LONG)


def test_a_name_that_nobody_has_loaded_has_no_other_one_loaded_again(tmp_path):
    """A batch of two adapters, one of them the client's own: the refusal of the other one comes at once."""

    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet"))
        now = asyncio.get_running_loop().time
        began_s, loads = now(), []
        cluster.coordinator.rollouts.adapters.load = lambda *given: loads.append(given)
        with pytest.raises(UnknownAdapter, match=r"adapter 'clerk' is not loaded \(loaded: poet\)"):
            async for _ in client.rollout(batch("poet", "clerk")):
                pass
        assert now() - began_s < 1.0 and not loads

    play(story, tmp_path)


def test_a_name_that_is_not_loaded_is_refused_and_one_that_is_unloaded_too(tmp_path):
    async def story(cluster, client):
        with pytest.raises(UnknownAdapter, match=r"adapter 'poet' is not loaded \(loaded: none\)"):
            async for _ in client.rollout(batch("poet")):
                pass
        async with client.open() as session:
            with pytest.raises(UnknownAdapter, match="call load_adapter first"):
                await session.generate(PROMPT, adapter="poet")
            await client.load_adapter("poet", put(cluster, "poet"))
            running = await under_way(cluster, session.generate(PROMPT, group="g", adapter="poet", max_tokens=200))
            await client.unload_adapter("poet")
            with pytest.raises(UnknownAdapter):
                await session.generate(PROMPT, index=1, adapter="poet")
            assert (await running).sample.token_ids == expected("poet", 0, 200)
        with pytest.raises(AdapterRejected, match="'poet' is not loaded"):
            await client.unload_adapter("poet")

    play(story, tmp_path, **LONG)


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("poet", "/nowhere", "no such folder"),
        ("poet", "poet", "give an absolute path"),
        ("", "/poet", "1 to 256 printable characters"),
        ("simulated", "/poet", "the served model has this name"),
    ],
)
def test_a_load_that_is_refused_changes_nothing(tmp_path, name, path, reason):
    async def story(cluster, client):
        put(cluster, "poet")
        with pytest.raises(AdapterRejected, match=reason):
            await client.load_adapter(name, path)
        assert await client.adapters() == ()

    play(story, tmp_path)


def test_a_late_replica_loads_the_adapter_with_its_first_chunk(tmp_path):
    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet"))
        for name in list(cluster.replicas):
            cluster.kill(name)
        (group,) = [group async for group in client.rollout(batch("poet", samples=4))]
        assert all(one.token_ids == expected("poet", one.sample_index, 60, "g-poet") for one in group.samples)

    play(story, tmp_path, **LONG)


def test_a_content_that_is_gone_fails_its_sample_alone_and_names_the_folder(tmp_path):
    """Many samples of it fail at once, and no replica is set aside for it."""

    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet"))
        for name in list(cluster.replicas):
            cluster.kill(name)
        put(cluster, "poet", "another")
        began_s = asyncio.get_running_loop().time()
        found = {group.prompt_id: group async for group in client.rollout(batch("poet", None, samples=6))}
        for sample in found["g-poet"].samples:
            assert sample.finish_reason is SampleEnd.FAILED and sample.token_ids == ()
            assert "/poet holds another content by now" in sample.error and "\n" not in sample.error
        assert all(one.token_ids == expected("", one.sample_index, 60, "g-None") for one in found["g-None"].samples)
        assert not any(replica.aside for replica in (await client.status()).replicas)
        assert asyncio.get_running_loop().time() - began_s < 60.0, "nothing was tried for minutes"

    play(story, tmp_path, **LONG)


def test_a_new_coordinator_knows_the_adapters_of_the_replicas(tmp_path):
    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet-1"))
        await client.load_adapter("poet", put(cluster, "poet-2"))
        client = driver_client(cluster)  # another driver
        asked = await under_way(cluster, anext(aiter(client.rollout(batch("poet", max_tokens=200)))))
        cluster.kill_coordinator()
        group = await asked
        assert all(one.token_ids == expected("poet-2", one.sample_index, 200, "g-poet") for one in group.samples)
        assert await client.adapters() == (("poet", 2, digest_of("poet-2"), "/poet-2"),)

    play(story, tmp_path, **LONG)


def test_a_client_loads_its_adapters_again_after_a_restart_of_all(tmp_path):
    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet"))
        for name in list(cluster.replicas):
            cluster.kill(name)
        cluster.kill_coordinator()
        (group,) = [group async for group in client.rollout(batch("poet"))]
        assert all(one.token_ids == expected("poet", one.sample_index, 60, "g-poet") for one in group.samples)

    play(story, tmp_path, **LONG)


def test_new_weights_and_an_adapter_both_decide_tokens(tmp_path):
    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet"))
        cluster.disk.folders["w1"] = "content-1"
        await client.update_weights(1, "w1")
        (group,) = [group async for group in client.rollout(batch("poet"))]
        for one in group.samples:
            assert one.token_ids == expected("poet", one.sample_index, 60, "g-poet", weights="content-1")
            assert {(part.weights_version, part.adapter_digest) for part in one.segments} == {(1, digest_of("poet"))}

    play(story, tmp_path, **LONG)


# ---- HTTP --------------------------------------------------------------------------------------------


async def completed(http, **body):
    return await http.post("/v1/completions", json={"prompt": list(PROMPT), "max_tokens": 20, "seed": 0} | body)


def test_vllm_s_routes_load_list_choose_and_unload(tmp_path):
    async def story(cluster, http):
        async with http() as trainer:
            asked = {"lora_name": "poet", "lora_path": put(cluster, "poet-1")}
            loaded = await trainer.post("/v1/load_lora_adapter", json=asked)
            assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
            again = await trainer.post("/v1/load_lora_adapter", json=asked)
            assert again.status_code == 400 and "has already been loaded" in again.json()["error"]["message"]
            models = (await trainer.get("/v1/models")).json()["data"]
            assert [(one["id"], one["parent"]) for one in models] == [("simulated", None), ("poet", "simulated")]
            assert models[1]["root"] == "/poet-1" and models[1]["tailrace"]["version"] == 1
            answer = (await completed(trainer, model="poet", return_token_ids=True)).json()
            (choice,) = answer["choices"]
            key = choice["tailrace"]
            assert answer["model"] == "poet" and key["adapter_digest"] == digest_of("poet-1")
            assert tuple(choice["token_ids"]) == expected("poet-1", 0, 20, key["group"])
            (plain,) = (await completed(trainer, return_token_ids=True)).json()["choices"]
            assert tuple(plain["token_ids"]) == expected("", 0, 20, key["group"])
            assert plain["tailrace"] == {name: value for name, value in key.items() if name != "adapter_digest"}
            in_place = asked | {"lora_path": put(cluster, "poet-2"), "load_inplace": True}
            assert (await trainer.post("/v1/load_lora_adapter", json=in_place)).status_code == 200
            (newer,) = (await completed(trainer, model="poet", return_token_ids=True)).json()["choices"]
            assert tuple(newer["token_ids"]) == expected("poet-2", 0, 20, key["group"])
            gone = await trainer.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
            assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
            refused = await completed(trainer, model="poet")
            assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")
            twice = await trainer.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
            assert twice.status_code == 404 and "cannot be found" in twice.json()["error"]["message"]

    play_gateway(story, tmp_path, **LONG)


def test_trainers_routes_replace_and_evaluators_may_only_choose(tmp_path):
    async def story(cluster, http):
        async with http() as trainer, http(Role.EVALUATOR) as evaluator:
            for number, path in enumerate(("/load_lora_adapter", "/skyrl/v1/load_lora_adapter"), start=1):
                asked = {"lora_name": "poet", "lora_path": put(cluster, f"poet-{number}")}
                assert (await evaluator.post(path, json=asked)).status_code == 403
                assert (await trainer.post(path, json=asked)).status_code == 200
                (choice,) = (await completed(evaluator, model="poet", return_token_ids=True)).json()["choices"]
                assert choice["tailrace"]["adapter_digest"] == digest_of(f"poet-{number}")
            unload = await evaluator.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
            assert unload.status_code == 403
            for body, reason in (
                ({"lora_name": "poet", "lora_path": "poet"}, "absolute path"),
                ({"lora_name": "", "lora_path": "/poet"}, "lora_name"),
                ({"lora_name": "x", "lora_path": "/poet", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
                ({"lora_name": "x", "upload_id": "7"}, "lora_path"),
            ):
                refused = await trainer.post("/load_lora_adapter", json=body)
                assert refused.status_code == 400 and reason in refused.json()["error"]["message"]

    play_gateway(story, tmp_path, **LONG)


def test_an_adapter_streams_and_another_name_is_a_404_before_the_first_event(tmp_path):
    async def story(cluster, http):
        async with http() as trainer:
            asked = {"lora_name": "poet", "lora_path": put(cluster, "poet")}
            await trainer.post("/load_lora_adapter", json=asked)
            streamed = await completed(trainer, model="poet", stream=True)
            assert digest_of("poet") in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
            other = await completed(trainer, model="judge", stream=True)
            assert other.status_code == 404
            assert other.json()["error"]["message"] == (
                "The model `judge` does not exist; 'simulated', 'poet' are served"
            )

    play_gateway(story, tmp_path, **LONG)


def test_no_sample_goes_on_with_another_adapter_from_the_token_log(tmp_path):
    async def story(cluster, client):
        await client.load_adapter("poet", put(cluster, "poet-1"))
        cluster.disk.folders["one"] = "one"

        async def rolled() -> list:
            return [group async for group in client.rollout(batch("poet", max_tokens=300))]

        work = await under_way(cluster, rolled())
        await client.update_weights(1, "one")
        await client.load_adapter("poet", put(cluster, "poet-2"))
        cluster.kill_coordinator()
        (group,) = await work
        for sample in group.samples:
            assert {part.adapter_digest for part in sample.segments} == {digest_of("poet-2")}
        assert cluster.coordinator.rollouts.token_log.problems["token_log.other_weights"] == 1

    play(story, tmp_path, **LONG)
