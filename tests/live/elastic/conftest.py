"""The service that the tests of this folder share: as in serve.elastic.yaml, with a draft model for free cores."""

import pytest

from tailrace.app.cluster import service
from tailrace.app.config import ELASTIC_CONFIG, ServeFile, load_config
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.replica_count import Replicas

DRAFT_MODEL = DrafterConfig(model="demo", mode="coupled", patience_s=300.0, replicas=Replicas(min=0, max=1))
"""As large as its target, so never ahead of it: here it drafts since samples wait for it, on however slow a machine."""


@pytest.fixture(scope="package")
def file() -> ServeFile:
    file = load_config(ELASTIC_CONFIG)
    return file.model_copy(update={"applications": (file.application.with_args(drafter=DRAFT_MODEL),)})


@pytest.fixture(scope="package")
def client(file, model_dir):
    with service(file, None) as client:
        yield client
