"""Trainers' own clients, unmodified, against a gateway on this machine: vLLM's weight-sync client and TRL's client."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import requests
import torch
from gateway_service import PROMPT, TOKENS, asked
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from waiting import until

from tailrace.app.calls.refused import WeightsRejected
from tailrace.app.model import perturbed
from tailrace.app.weights.over_http import HttpWeights
from tailrace.app.weights.trainer_engine import MemoryTrainerEngine, MemoryTrainerInitInfo, register


@pytest.fixture(scope="module")
def other(tiny_model, tmp_path_factory):
    return perturbed(tiny_model, tmp_path_factory.mktemp("other") / "weights", seed=2, scale=0.5)


def test_vllms_weight_sync_client_brings_weights_through_memory(http, trainer_url, other, tiny_model):
    register()
    before = asked(http, 0)["choices"][0]
    assert http.post("/update_weights", json={"weight_dir": str(other)}).status_code == 200
    by_folder = asked(http, 0)["choices"][0]
    assert http.post("/update_weights", json={"weight_dir": str(tiny_model)}).status_code == 200
    version = int(http.get("/weight_info").json()["weight_version"])
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    sync = HTTPVLLMWeightSyncClient(trainer_url)
    engine = WeightTransferTrainerFactory.trainer_init(
        MemoryTrainerInitInfo(rank=0), client=sync, source=ModuleSource(model)
    )
    engine.send_weights()
    after = asked(http, 0)["choices"][0]
    assert after["token_ids"] == by_folder["token_ids"] != before["token_ids"]
    assert [span["version"] for span in after["weight_versions"]] == [str(version + 1)]
    sync.start_weight_update()  # and breaks off
    sync.start_weight_update()
    with pytest.raises(requests.HTTPError, match="400"):
        sync.finish_weight_update("99")
    sync.shutdown_weight_transfer_engine()
    assert http.get("/weight_info").json()["weight_version"] == str(version + 1)
    with pytest.raises(requests.HTTPError, match="401"):
        HTTPVLLMWeightSyncClient(trainer_url.replace("trainer:", "trainer:x")).start_weight_update()


@pytest.mark.parametrize("broken", ["start_weight_update", "status_blocking", "stage_weights_blocking"])
def test_the_sender_reads_its_source_to_the_end_as_other_ranks_do_if_an_update_breaks_off(broken):
    def fail(*arguments):
        if broken == "stage_weights_blocking":
            next(arguments[1])
        raise ConnectionError("the gateway is gone")

    class Source:
        def __iter__(self):
            for name in "abc":
                read.append(name)  # a collective of all ranks
                yield name, None

    def rank(is_sender: bool) -> MemoryTrainerEngine:
        return MemoryTrainerEngine(service=service, client=service, source=Source(), is_sender=is_sender)

    read = []
    calls = {"start_weight_update": lambda: None, "status_blocking": lambda: SimpleNamespace(weights_version=1)}
    service = SimpleNamespace(**calls | {broken: fail})
    with pytest.raises(ConnectionError, match="the gateway is gone"):
        rank(True).send_weights()
    assert read == ["a", "b", "c"]
    rank(False).send_weights()
    assert read == ["a", "b", "c"] * 2


def test_a_pause_holds_samples_in_flight_and_new_ones_and_changes_no_token(address, http):
    client, settings = address[1], {"sampling_params": {"max_tokens": 480, "ignore_eos": True}}
    with ThreadPoolExecutor(6) as pool:
        expected = list(pool.map(lambda index: asked(http, index, **settings), range(6)))
        tokens = [one["choices"][0]["token_ids"] for one in expected]
        calls = [pool.submit(asked, http, index, **settings) for index in range(3)]
        # All three, since one that is still on its way to the service would be counted among those that come later.
        until(lambda: client.status_blocking().running + sum(call.done() for call in calls) == 3)
        assert http.post("/pause?mode=keep").json() == {"status": "paused"}
        assert http.get("/is_paused").json() == {"is_paused": True} and client.status_blocking().running == 0
        waiting = client.status_blocking().waiting
        calls += [pool.submit(asked, http, index, **settings) for index in range(3, 6)]
        until(lambda: client.status_blocking().waiting == waiting + 3)
        assert client.status_blocking().running == 0 and http.get("/health").status_code == 200
        assert http.post("/resume").json() == {"status": "resumed"}
        assert [call.result()["choices"][0]["token_ids"] for call in calls] == tokens


def test_weights_over_http_need_no_ray_at_the_trainer(http, trainer_url, tiny_model):
    weights = HttpWeights(trainer_url)
    version = weights.status_blocking().weights_version
    tensors = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    del tensors["lm_head.weight"]  # tied
    loaded = weights.send_weights_blocking(version + 1, tensors)
    assert loaded.version == version + 1 and loaded.digest and loaded.staged_s > 0
    del tensors["model.norm.weight"]
    with pytest.raises(WeightsRejected, match=r"no tensor model\.norm\.weight, which the running model has"):
        weights.send_weights_blocking(version + 2, tensors)
    assert weights.status_blocking() == (version + 1, loaded.digest)
    with pytest.raises(PermissionError, match="needs role trainer"):
        HttpWeights(trainer_url.replace(TOKENS["trainer"], TOKENS["observer"])).send_weights_blocking(9, tensors)


def test_trls_client_generates_and_chats_and_says_which_transfer_engine_is_absent(trainer_url):
    client = VLLMClient(trainer_url)
    settings = {"n": 2, "max_tokens": 8, "generation_kwargs": {"seed": 5}}
    found = client.generate([list(PROMPT), [7, 8]], **settings)
    assert found["prompt_ids"] == [list(PROMPT), [7, 8]]
    assert [len(ids) for ids in found["completion_ids"]] == [8] * 4
    assert found["logprob_token_ids"] == [[[token] for token in ids] for ids in found["completion_ids"]]
    assert client.generate([list(PROMPT), [7, 8]], **settings) == found, "the seed is the first index"
    messages = [[{"role": "user", "content": text}] for text in ("Hello", "Good night")]
    chats = client.chat(messages, **settings)
    assert len(chats["prompt_ids"]) == 2 and [len(ids) for ids in chats["completion_ids"]] == [8] * 4
    assert chats["logprob_token_ids"] == [[[token] for token in ids] for ids in chats["completion_ids"]]
    assert client.get_world_size() == 2
    assert client.get_server_info()["model_config"] | {"model": ""} == {
        "model": "", "max_model_len": 512, "logprobs_mode": "processed_logprobs", "dtype": "torch.float32",
    }  # fmt: skip
    client.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
        client.init_communicator("cpu")
    scores = client.get_sequence_logprobs([[5, 6, 7]], [1], top_logprobs=5)
    assert [len(one) for one in scores["logprob_token_ids"][0]] == [5, 5]
    assert all(one == sorted(one, reverse=True) and max(one) < 0 for one in scores["logprobs"][0])
