"""Ray's token mode for every live test, and the smallest model that a service can run: its steps are a few ms."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny

os.environ.setdefault("RAY_AUTH_MODE", "token")  # before Ray is imported; a service refuses to start without

SHALLOW_LAYERS = 4


@pytest.fixture(scope="session", autouse=True)
def token():
    """Ray's token, made if there is none: clusters of several nodes do not make their own."""
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled

    ensure_token_if_auth_enabled(create_token_if_missing=True)


@pytest.fixture(scope="session")
def a_core_each(worker_id):
    """Engines without Ray that run side by side have a core of their own: all of them have rank 0."""
    if worker_id != "master":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker_id.removeprefix("gw")) % len(cores)]})
        if "torch" in sys.modules:  # its two threads would wait for each other
            from tailrace.deployments.vllm_exact.launch import limit_threads

            limit_threads(1)


@pytest.fixture(scope="session")
def shallow_model(model_dir, tmp_path_factory) -> Path:
    """Folder of the demo model's first layers: its text repeats itself, as drafts need, and a step takes a third."""
    from live.drafter.cut_models import cut

    folder = cut(model_dir, tmp_path_factory.mktemp("shallow") / "model", SHALLOW_LAYERS)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def tiny_model(model_dir, tmp_path_factory) -> Path:
    """Folder of a model of two layers with random weights and the first tokens of the demo model."""
    return save_tiny(model_dir, tmp_path_factory.mktemp("tiny") / "model", 8192)


@pytest.fixture(scope="session")
def other_tiny_weights(tiny_model, tmp_path_factory) -> Path:
    """The tiny model's folder with other weights."""
    from tailrace.app.model import perturbed

    return perturbed(tiny_model, tmp_path_factory.mktemp("weights") / "other", scale=0.05)


@pytest.fixture(scope="module")
def address(tiny_model, tmp_path_factory):
    """The address of a gateway, and a client by Ray of its service; see `gateway_service`."""
    from gateway_service import gateway

    with gateway(tiny_model, tmp_path_factory.mktemp("gateway")) as found:
        yield found
