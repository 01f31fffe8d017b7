"""The service that the tests of this folder share: as in serve.elastic.yaml, with a draft model for free cores."""

import pytest
import yaml

from tailrace.app.cluster import service
from tailrace.app.config import ELASTIC_CONFIG, ServeFile

DRAFT_MODEL = {"model": "demo", "mode": "coupled", "patience_s": 300.0}
"""As large as its target, so never ahead of it: here it drafts since samples wait for it, on however slow a machine."""

DRAFTER = {
    "name": "Drafter",
    "autoscaling_config": {
        "min_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0, "downscale_delay_s": 0,
        "metrics_interval_s": 0.3, "look_back_period_s": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="package")
def file() -> ServeFile:
    file = yaml.safe_load(ELASTIC_CONFIG.read_text())
    file["applications"][0]["args"]["drafter"] = DRAFT_MODEL
    file["applications"][0]["deployments"].append(DRAFTER)
    return ServeFile.model_validate(file)


@pytest.fixture(scope="package")
def client(file, model_dir):
    with service(file, None) as client:
        yield client
