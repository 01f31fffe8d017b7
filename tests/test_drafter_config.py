"""A draft model in the configuration: refused by name where it cannot work, else as the target but for what it says."""

import pytest
from pydantic import ValidationError

from app.config import ServeFile
from deployments.context.plan import Way
from deployments.drafter.config import DrafterConfig
from deployments.engine.config import DraftConfig, EngineConfig


def file_of(args: dict, *deployments: dict) -> ServeFile:
    return ServeFile.model_validate({"applications": [{"args": args, "deployments": list(deployments)}]})


@pytest.mark.parametrize(
    ("args", "deployments", "said"),
    [
        ({"drafter": {"model": "m"}, "engine": {"model": "t", "draft": {"method": "ngram"}}}, (), "group or model"),
        ({"engine": {"model": "t", "draft": {"method": "model"}}}, (), "name a draft model there"),
        ({}, ({"name": "Drafter"},), "args.drafter is null"),
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
    assert file.application.args.drafter.way == Way(4, False)


def test_its_engine_is_the_targets_but_for_what_it_says():
    target = EngineConfig(model="t", max_model_len=128, draft=DraftConfig(method="model"), vllm_args={"a": 1})
    engine = DrafterConfig(model="m", max_running=5, mode="coupled").engine(target)
    assert (engine.model, engine.max_running, engine.max_model_len, engine.vllm_args) == ("m", 5, 128, {})
    assert engine.draft.method == "off"
