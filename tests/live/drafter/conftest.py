"""The service of a target and its draft model, with a KV pool, that the tests of this folder share."""

import shutil
from pathlib import Path

import pytest
from listening_sockets import open_sockets
from live.drafter.cut_models import DRAFT_LAYERS, TARGET_LAYERS, cut, drafter_of, engine_of

from tailrace.app.cluster import service
from tailrace.app.config import ServeFile


@pytest.fixture(scope="package")
def models(model_dir, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    yield cut(model_dir, folder / "target", TARGET_LAYERS), cut(model_dir, folder / "drafter", DRAFT_LAYERS)
    shutil.rmtree(folder)


@pytest.fixture(scope="package")
def before() -> set[tuple[int, str, int]]:
    """Sockets that were open before the service started."""
    return open_sockets()


@pytest.fixture(scope="package")
def client(models, before):
    target, drafter = models
    args = {"replicas": 1, "engine": engine_of(target), "drafter": drafter_of(drafter), "pool": {"dram_gib": 0.25}}
    with service(ServeFile.model_validate({"applications": [{"args": args}]}), None) as client:
        yield client
