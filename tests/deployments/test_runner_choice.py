"""The choice of vLLM's model runner: its own switch, the drafts that each takes, refusals at the start."""

import pytest
from pydantic import ValidationError

from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.deployments.vllm_exact.launch import engine_arguments, process_settings

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
MTP = {"method": "mtp", "num_speculative_tokens": 1}


def config(runner: str, method: str = "group") -> EngineConfig:
    return EngineConfig(model="m", device="gpu", model_runner=runner, draft=DraftConfig(method=method, draft_tokens=5))


def test_the_choice_is_vllms_own_switch_and_v2_by_default_on_gpus():
    assert [process_settings(config(runner), None)[SWITCH] for runner in ("v1", "v2")] == ["0", "1"]
    assert process_settings(EngineConfig(model="m"), None)[SWITCH] == "0"
    assert process_settings(EngineConfig(model="m", device="gpu"), None)[SWITCH] == "1"


def test_a_gpu_loads_no_sampler_that_ours_replaces():
    """V1's own sampler imports FlashInfer, which need not be installed and takes seconds."""
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    assert [process_settings(config(runner), None).get(name) for runner in ("v1", "v2")] == ["0", "0"]
    assert name not in process_settings(EngineConfig(model="m"), None)


def test_v2_verifies_the_drafts_of_groups_by_a_method_that_it_has():
    """vLLM refuses V2 with a proposer of ours: `custom_class` is not among V2's methods."""
    assert engine_arguments(config("v1"))["speculative_config"]["method"] == "custom_class"
    for method in ("group", "model"):
        found = engine_arguments(config("v2", method))["speculative_config"]
        assert (found["method"], found["num_speculative_tokens"]) == ("ngram", 5)
    assert "speculative_config" not in engine_arguments(config("v2", "off"))


def test_vllms_vllm_drafter_gets_room_for_the_longest_draft_in_whole_proposals():
    """vLLM wants a multiple of the tokens that a model predicts; `per_batch_size` is what it captures graphs for."""
    given = {"method": "mtp", "num_speculative_tokens": 2, "draft_sample_method": "greedy"}
    found = {}
    for runner in ("v1", "v2"):
        own = EngineConfig(
            model="m", device="gpu", model_runner=runner, max_running=6, vllm_args={"speculative_config": given},
            draft=DraftConfig(method="vllm", draft_tokens=5), redraw_close_calls=False,
        )  # fmt: skip
        found[runner] = engine_arguments(own)["speculative_config"]
        assert own.draft_tokens == own.sized_draft.draft_tokens == 4
    assert found["v1"] == given | {"num_speculative_tokens": 4}
    assert found["v2"] == found["v1"] | {"num_speculative_tokens_per_batch_size": [[1, 6, 2]]}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "cpu"}, "model_runner v2 runs on GPUs alone; with device cpu take v1"),
        (
            {"device": "gpu", "vllm_args": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}}},
            "model_runner v2 has no suffix drafter; take another",
        ),
    ],
)
def test_a_setting_that_v2_cannot_carry_is_refused(given, reason):
    with pytest.raises(ValidationError, match=reason) as refused:
        EngineConfig.model_validate({"model": "m", "model_runner": "v2"} | given)
    assert len(refused.value.errors()) == 1


@pytest.mark.parametrize(
    ("given", "ahead"),
    [
        ({}, True),
        ({"draft": {"method": "off"}}, True),
        ({"draft": {"method": "model"}}, True),
        ({"vllm_args": {"async_scheduling": False}}, False),
        ({"draft": {"method": "vllm"}, "vllm_args": {"speculative_config": MTP}}, True),
        ({"exactness": "bits", "redraw_close_calls": True}, False),
        ({"model_runner": "v1"}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_steps_run_ahead_on_gpus_unless_something_needs_each_token_first(given, ahead):
    config = EngineConfig.model_validate({"model": "m", "device": "gpu"} | given)
    assert config.runs_ahead == ahead
    assert engine_arguments(config)["async_scheduling"] is False  # vLLM's checks come first, see `launch.started`


def test_steps_ahead_that_cannot_be_are_refused():
    with pytest.raises(ValidationError, match=r"vllm_args\.async_scheduling: it needs device: gpu"):
        EngineConfig(model="m", vllm_args={"async_scheduling": True})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"draft": {"method": "vllm"}}, r"draft\.method: vllm needs vllm_args\.speculative_config, such as"),
        ({"draft": {"method": "off"}, "vllm_args": {"speculative_config": MTP}}, "draft.method is off; write vllm or"),
        ({"vllm_args": {"speculative_config": {"method": "mtp"}}}, "it needs num_speculative_tokens, from 1 to 16"),
        ({"vllm_args": {"speculative_config": MTP | {"num_speculative_tokens": 17}}}, "from 1 to 16"),
        ({"vllm_args": {"speculative_config": MTP, "data_parallel_size": 2}}, "remove vllm_args.data_parallel_size"),
        (
            {"draft": {"method": "ngram"}},
            "write vllm, and its drafter in vllm_args.speculative_config, with method: ngr",
        ),
    ],
)
def test_a_drafter_that_cannot_work_is_refused_in_one_line(given, reason):
    with pytest.raises(ValidationError, match=reason) as refused:
        EngineConfig.model_validate({"model": "m"} | given)
    assert "\n" not in refused.value.errors()[0]["msg"]
