"""A draft model in the configuration: refused by name where it cannot work, else as the target but for what it says."""

import pytest
import yaml
from pydantic import ValidationError

from tailrace.app.config import ELASTIC_CONFIG, ServeFile
from tailrace.deployments.drafter.config import DrafterConfig
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.policies.protocol.actions import DraftMode


def file_of(args: dict, *deployments: dict) -> ServeFile:
    return ServeFile.model_validate({"applications": [{"args": args, "deployments": list(deployments)}]})


PLANNING = {"name": "Coordinator", "user_config": {"policies": {"draft_models": "planned"}}}


@pytest.mark.parametrize(
    ("args", "deployments", "said"),
    [
        ({"drafter": {"model": "m"}, "engine": {"model": "t", "draft": {"method": "ngram"}}}, (), "group or model"),
        ({"engine": {"model": "t", "draft": {"method": "model"}}}, (), "name a draft model there"),
        ({}, ({"name": "Drafter"},), "args.drafter is null"),
        ({}, (PLANNING,), "policies.draft_models planned needs args.drafter"),
        ({"drafter": {"model": "m", "windw": 3}}, (), "windw"),
        ({"drafter": {"model": "m", "window": 0}}, (), "greater than or equal to 1"),
    ],
)
def test_what_cannot_work_is_refused(args, deployments, said):
    with pytest.raises(ValidationError, match=said):
        file_of(args, *deployments)


def test_a_draft_model_with_replicas_of_its_own_is_taken():
    file = file_of({"drafter": {"model": "m"}}, {"name": "Drafter", "num_replicas": 3})
    assert file.application.of("Drafter").num_replicas == 3
    assert file.application.args.drafter.draft_mode == DraftMode(4, False)


def test_its_engine_is_the_targets_but_for_what_it_says():
    target = EngineConfig(
        model="t", max_model_len=128, draft=DraftConfig(method="model"), vllm_args={"enable_lora": True}
    )
    engine = DrafterConfig(model="m", max_running=5, mode="coupled").engine(target)
    assert (engine.model, engine.max_running, engine.max_model_len, engine.vllm_args) == ("m", 5, 128, {})
    assert engine.draft.method == "off"


SCALING = {
    "min_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0, "downscale_delay_s": 0, "metrics_interval_s": 0.3,
    "look_back_period_s": 1,
}  # fmt: skip


def elastic(tail: str, drafter: dict, draft_models: dict | str = "as_configured", **drafters) -> ServeFile:
    """serve.elastic.yaml with a draft model."""
    data = yaml.safe_load(ELASTIC_CONFIG.read_text())
    (application,) = data["applications"]
    application["args"]["drafter"] = drafter
    application["deployments"].append({"name": "Drafter", **drafters})
    application["deployments"][0]["user_config"]["policies"] |= {"tail": {"type": tail}, "draft_models": draft_models}
    return ServeFile.model_validate(data)


def test_draft_models_come_and_go_with_the_replicas_that_are_given_back():
    file = elastic("draft", {"model": "m"}, autoscaling_config=SCALING)
    assert file.application.of("Drafter").num_replicas is None
    assert elastic("consolidate", {"model": "m"}).application.of("Drafter").num_replicas == 1
    with pytest.raises(ValidationError, match="tail draft needs"):
        elastic("draft", {"model": "m"}, num_replicas=1)
    planned = {"type": "planned"}
    assert elastic("auto", {"model": "m"}, num_replicas=1)
    assert elastic("auto", {"model": "m"}, planned, autoscaling_config=SCALING)
    with pytest.raises(ValidationError, match="tail auto needs"):
        elastic("auto", {"model": "m"}, planned, num_replicas=1)
    with pytest.raises(ValidationError, match="remove one of them"):
        elastic("draft", {"model": "m"}, autoscaling_config=SCALING, num_replicas=1)
    with pytest.raises(ValidationError, match="replicas that come and go"):
        file_of({"drafter": {"model": "m"}}, {"name": "Drafter", "autoscaling_config": SCALING})
