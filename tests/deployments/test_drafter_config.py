"""A draft model in the configuration: refused by name where it cannot work, else as the target but for what it says."""

import pytest
import yaml
from pydantic import ValidationError

from tailrace.app.config import ELASTIC_CONFIG, ServeFile
from tailrace.app.deployment_options import options_of
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.policies.protocol.actions import DraftMode


def file_of(args: dict, *deployments: dict) -> ServeFile:
    return ServeFile.model_validate({"applications": [{"args": args, "deployments": list(deployments)}]})


PLANNING = {"name": "Coordinator", "user_config": {"policies": {"draft_models": "planned"}}}


@pytest.mark.parametrize(
    ("args", "deployments", "said"),
    [
        ({"drafter": {"model": "m"}, "engine": {"model": "t", "draft": {"method": "off"}}}, (), "group or model"),
        ({"engine": {"model": "t", "draft": {"method": "model"}}}, (), "name a draft model there"),
        ({}, ({"name": "Drafter"},), "args.drafter is null"),
        ({}, (PLANNING,), "policies.draft_models planned needs args.drafter"),
        ({"drafter": {"model": "m", "windw": 3}}, (), "windw"),
        ({"drafter": {"model": "m", "window": 8}}, (), "drafter.window: no longer a key; remove it: it is fixed at 4"),
        ({"drafter": {"model": "m", "mode": "coupled"}}, (), "drafter.mode: no longer a key; remove it: it is"),
    ],
)
def test_what_cannot_work_is_refused(args, deployments, said):
    with pytest.raises(ValidationError, match=said):
        file_of(args, *deployments)


def test_a_draft_model_with_replicas_of_its_own_is_taken():
    file = file_of({"drafter": {"model": "m", "replicas": 3}})
    assert options_of(file.application.args)["Drafter"]["num_replicas"] == 3
    assert file.application.args.drafter.draft_mode == DraftMode(4, False)


def test_its_engine_is_the_targets_but_for_what_it_says():
    target = EngineConfig(
        model="t", max_model_len=128, draft=DraftConfig(method="model"), vllm_args={"enable_lora": True}
    )
    engine = DrafterConfig(model="m", max_running=5, mode="coupled").engine(target)
    assert (engine.model, engine.max_running, engine.max_model_len, engine.vllm_args) == ("m", 5, 128, {})
    assert engine.draft.method == "off"


SOME = {"min": 0, "max": 1}


def elastic(tail: str, replicas: int | dict, draft_models: str = "as_configured") -> ServeFile:
    """serve.elastic.yaml with a draft model."""
    data = yaml.safe_load(ELASTIC_CONFIG.read_text())
    (application,) = data["applications"]
    application["args"]["drafter"] = {"model": "m", "replicas": replicas}
    application["deployments"][0]["user_config"]["policies"] |= {"tail": tail, "draft_models": draft_models}
    return ServeFile.model_validate(data)


def test_draft_models_come_and_go_with_the_replicas_that_are_given_back():
    drafter = options_of(elastic("draft", SOME).application.args)["Drafter"]
    assert "num_replicas" not in drafter and drafter["autoscaling_config"]["initial_replicas"] == 0
    assert options_of(elastic("consolidate", 1).application.args)["Drafter"]["num_replicas"] == 1
    with pytest.raises(ValidationError, match="tail draft needs"):
        elastic("draft", 1)
    assert elastic("auto", 1)
    assert elastic("auto", SOME, "planned")
    with pytest.raises(ValidationError, match="tail auto needs"):
        elastic("auto", 1, "planned")
    with pytest.raises(ValidationError, match=r"replicas` two as well"):
        file_of({"drafter": {"model": "m", "replicas": SOME}})
    with pytest.raises(ValidationError, match=r"give \{min: 0, max: N\}"):
        elastic("draft", {"min": 1, "max": 2})
