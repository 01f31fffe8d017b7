"""The service that the tests of this folder share: as in serve.elastic.yaml, with a draft model for free cores.

Its models have the first layers of the demo model, as in `deployed`.
"""

import pytest

from tailrace.app.cluster import service
from tailrace.app.config import ELASTIC_CONFIG, ServeFile, load_config, with_engine
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.replica_count import Replicas

MAX_MODEL_LEN = 8192


@pytest.fixture(scope="package")
def file(shallow_model) -> ServeFile:
    """With a draft model as large as its target, so never ahead of it: it drafts since samples wait for it, on however
    slow a machine."""
    engine = {"model": str(shallow_model), "max_model_len": MAX_MODEL_LEN}
    file = with_engine(load_config(ELASTIC_CONFIG), engine)
    drafter = DrafterConfig(model=str(shallow_model), mode="coupled", patience_s=300.0, replicas=Replicas(min=0, max=1))
    return file.model_copy(update={"applications": (file.application.with_args(drafter=drafter),)})


@pytest.fixture(scope="package")
def client(file):
    with service(file, None) as client:
        yield client
