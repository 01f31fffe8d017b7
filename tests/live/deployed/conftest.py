"""The service that the tests of this folder share: started for the first of them, gone without a trace at the end.

Its model has the first layers of the demo model, so that a step takes a third of the time; with `--long` it is the demo
model.
"""

import asyncio
import shutil
from pathlib import Path

import pytest
import yaml
from waiting import until

from tailrace.app.cluster import service
from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.model import perturbed
from tailrace.lab.verification.leftovers import processes_of


@pytest.fixture(scope="package")
def served_model(request, pytestconfig) -> Path:
    return request.getfixturevalue("model_dir" if pytestconfig.getoption("--long") else "shallow_model")


@pytest.fixture(scope="package")
def other_weights(served_model, tmp_path_factory) -> Path:
    """The served model's folder with other weights."""
    folder = perturbed(served_model, tmp_path_factory.mktemp("weights") / "other", scale=0.05)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="package")
def config_path(served_model, tmp_path_factory) -> Path:
    """serve.yaml, with that model."""
    file = yaml.safe_load(DEFAULT_CONFIG.read_text())
    file["applications"][0]["args"]["engine"]["model"] = str(served_model)
    path = tmp_path_factory.mktemp("deployed") / "serve.yaml"
    path.write_text(yaml.safe_dump(file))
    return path


@pytest.fixture(scope="package")
def client(config_path):
    with service(load_config(config_path), None) as client:
        master = until(lambda: asyncio.run(client.status()).pool.status)["master_address"]
        assert processes_of(master)
        yield client
    until(lambda: not processes_of(master))
