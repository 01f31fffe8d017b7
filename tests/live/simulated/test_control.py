"""The gateway's control routes on the simulated cluster: vLLM's dialect, roles, pauses, updates whole or not at all."""

from hashlib import blake2b

import pytest
from virtual_cluster import play_gateway, quiet, under_way

from tailrace.app.gateway import service
from tailrace.app.gateway.control_routes import REFUSED
from tailrace.deployments.messages.roles import Role
from tailrace.lab.fuzz import replica, stepper

MEETING = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}


@pytest.fixture
def play(tmp_path):
    return lambda story, **sizes: play_gateway(story, tmp_path, **sizes)


def hex_digest(content: str) -> str:
    return blake2b(content.encode(), digest_size=8).hexdigest()


async def generated(http, index: int = 0, **headers) -> dict:
    named = {"X-Tailrace-Group": "g", "X-Tailrace-Index": str(index)} | headers
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 300}}
    return (await http.post("/inference/v1/generate", json=body, headers=named)).json()["choices"][0]


def test_a_pause_as_prime_rl_and_skyrl_ask_for_it_keeps_samples(play):
    async def story(cluster, http):
        http = http()
        expected = await generated(http)
        work = await under_way(cluster, generated(http))
        assert (await http.get("/is_paused")).json() == {"is_paused": False}
        paused = await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert paused.json() == {"status": "paused"}
        await quiet(cluster)
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        assert (await http.get("/health")).status_code == 200, "as vLLM's"
        assert (await http.post("/reset_prefix_cache", json={"reset_running_requests": False})).json()["success"]
        assert (await http.post("/resume")).json() == {"status": "resumed"}
        assert (await work)["token_ids"] == expected["token_ids"]

    play(story)


def test_a_pause_by_default_aborts_with_tokens_so_far(play):
    async def story(cluster, http):
        http = http()
        expected = await generated(http)
        work = await under_way(cluster, generated(http))
        await http.post("/pause")
        choice = await work
        count = len(choice["token_ids"])
        assert choice["finish_reason"] == "abort" and 0 < count < len(expected["token_ids"])
        assert choice["token_ids"] == expected["token_ids"][:count]
        await http.post("/resume")

    play(story)


def test_requests_are_aborted_all_at_once_without_a_pause(play):
    async def story(cluster, http):
        http = http()
        work = await under_way(cluster, generated(http))
        assert (await http.post("/reset_prefix_cache")).json() == {"success": False}, "chunks run"
        refused = await http.post("/abort_requests", json={"request_ids": ["a"]})
        assert refused.status_code == 400 and "ends when its client hangs up" in refused.text
        assert (await http.post("/abort_requests", json={})).json() == {"status": "aborted", "aborted": 1}
        assert (await work)["finish_reason"] == "abort"
        assert not cluster.coordinator.rollouts.status().paused

    play(story)


def test_an_update_in_phases_is_committed_whole_or_not_at_all(play, monkeypatch):
    source = f"memory:here-1/1/{hex_digest('content-1')}"
    staged = {"update_info": {"source": source}}

    async def story(cluster, http):
        http = http()
        cluster.disk.folders[source] = "content-1"

        async def phase(name, json=None) -> str:
            return (await http.post(f"/{name}", json=json)).text

        async def version() -> str:
            return (await http.get("/weight_info")).json()["weight_version"]

        assert "start_weight_update before init" in await phase("start_weight_update")
        await phase("init_weight_transfer_engine", {"init_info": {"backend": "tailrace_memory"}})
        assert "no weight update is open" in await phase("update_weights", staged)
        await phase("start_weight_update", {"is_checkpoint_format": True})
        assert "finish_weight_update without update_weights" in await phase("finish_weight_update", {})
        await phase("start_weight_update", {})
        await phase("update_weights", staged)
        assert await version() == "0", "nothing is committed before `finish`"
        await phase("start_weight_update")  # a trainer that broke off, and begins again
        assert "without update_weights" in await phase("finish_weight_update") and await version() == "0"
        await phase("start_weight_update")
        await phase("update_weights", {"update_info": {"source": "memory:here-1/1/ffffffffffffffff"}})
        assert "error" in await phase("finish_weight_update") and await version() == "0"
        for name, number in ((None, "1"), ({"weight_version": "7"}, "7")):
            await phase("start_weight_update")
            await phase("update_weights", staged)
            assert f'"weight_version":"{number}"' in await phase("finish_weight_update", name)
            assert await version() == number
        await phase("start_weight_update")
        await phase("update_weights", staged)
        assert "is below 7; versions only grow" in await phase("finish_weight_update", {"weight_version": "6"})
        assert "message" in await phase("shutdown_weight_transfer_engine")
        assert "before init" in await phase("start_weight_update") and await version() == "7"

    for module in (stepper, replica):
        monkeypatch.setattr(module, "digest_of", hex_digest)  # as those of memory are
    monkeypatch.setattr(service, "slot_of", lambda source: source)
    play(story)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/update_weights", {"weight_dir": None}, "give weight_dir, a folder, or update_info; prime-rl:"),
        ("/update_weights", {"weight_dir": "w1", "update_info": {}}, "or update_info; not both"),
        (
            "/update_weights",
            {"update_info": {"source": "memory:x/1/0123456789abcdef"}},
            "is not in the memory of",
        ),
        ("/update_weights", {"update_info": {"names": []}}, "no weight update is open"),
        ("/update_weights", {"weight_dir": "/nowhere"}, "/nowhere"),
        ("/init_weight_transfer_engine", {"init_info": {"packed": True}}, "IPC's handles come pickled over HTTP"),
        ("/init_weight_transfer_engine", {"init_info": MEETING}, "has no transfer engine nccl: give its engine vllm_"),
        ("/init_weight_transfer_engine", {"init_info": {"colour": 1}}, "no transfer engine has colour"),
        ("/init_weight_transfer_engine", {}, "init_info: Field required"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "under the names of a saved folder; give true"),
        ("/finish_weight_update", {"weight_version": "next"}, "weight_version: 'next' is not a number"),
        ("/update_weight_version", {"new_version": "7"}, "the weights are those of the start; update them first"),
        ("/pause?mode=slowly", None, "mode: Input should be 'keep', 'wait' or 'abort'"),
        *((path, {}, reason) for path, reason in REFUSED.items()),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(play, path, body, reason):
    async def story(cluster, http):
        answer = await http().post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == 400
        assert reason in error["message"] and "\n" not in error["message"]
        status = cluster.coordinator.rollouts.status()
        assert status.weights_version == 0 and not status.paused

    play(story)


def test_prime_rl_s_way_to_update_by_a_folder(play):
    async def story(cluster, http):
        http = http()
        cluster.disk.folders["w1"] = "content-1"
        work = await under_way(cluster, generated(http))
        await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert (await http.post("/update_weights", json={"weight_dir": "w1"})).json()["weight_version"] == "1"
        await http.post("/resume")
        assert [span["version"] for span in (await work)["weight_versions"]] == ["0", "1"]
        renamed = await http.post("/update_weight_version", json={"new_version": "9"})
        assert renamed.json() == {"success": True, "new_version": "9"}
        assert (await http.get("/weight_info")).json()["weight_version"] == "9"

    play(story, mean_tokens=400)


def test_control_needs_a_trainer_and_reading_an_observer(play):
    async def story(cluster, http):
        cluster.disk.folders["w1"] = "content-1"
        for role in (Role.OBSERVER, Role.EVALUATOR):
            caller = http(role)
            for path, body in (
                ("/pause", None), ("/resume", None), ("/abort_requests", {}), ("/reset_prefix_cache", None),
                ("/update_weights", {"weight_dir": "w1"}), ("/start_weight_update", None),
                ("/finish_weight_update", None), ("/shutdown_weight_transfer_engine", None), ("/weight_slots", None),
                ("/init_weight_transfer_engine", {"init_info": {"backend": "tailrace_memory"}}),
            ):  # fmt: skip
                answer = await caller.post(path, json=body)
                assert answer.status_code == 403 and "needs role trainer" in answer.text, path
            answer = await caller.get("/weights/next")
            assert answer.status_code == 403 and "needs role trainer" in answer.text, "as publishing"
            assert (await caller.get("/is_paused")).json() == {"is_paused": False}
            assert (await caller.get("/get_world_size")).json() == {"world_size": 2}
            config = (await caller.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
            assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
            assert config["weight_transfer_config"] is None is config["lora_config"]
        assert (await http(Role.TRAINER).get("/weights/next")).json() == {"weight_version": "1"}

    play(story)
