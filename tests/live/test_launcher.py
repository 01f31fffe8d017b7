"""The cluster files: Ray's own launcher accepts them."""

import copy
from pathlib import Path

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["cluster.yaml", "cluster.local.yaml"])
def config(request):
    return yaml.safe_load((ROOT / request.param).read_text())


def test_the_launcher_accepts_it(config):
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    assert prepared["head_start_ray_commands"] == config["head_start_ray_commands"]


def test_the_launcher_refuses_an_unknown_key(config):
    with pytest.raises(ValidationError, match="no_such_key"):
        validate_config(prepare_config(config | {"no_such_key": 1}))
