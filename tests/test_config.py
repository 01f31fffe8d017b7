"""serve.yaml is strict: what Serve would ignore silently is an error here, on one line that names the key."""

from pathlib import Path

import pytest
import yaml

from tailrace.app.cluster import declared
from tailrace.app.config import ServeFile, load_config
from tailrace.app.errors import BadInput

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["serve.yaml", "serve.elastic.yaml", "serve.gpu.yaml"])
def test_the_files_we_ship_load(name):
    application = load_config(ROOT / name).application
    assert application.import_path == "tailrace.app.build:build"
    assert application.of("Engine").most_replicas >= 2
    assert application.of("Coordinator").user_config.policies.ordering.type == "seer"


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(path) == ServeFile()


def changed(where: tuple, value) -> dict:
    """serve.yaml with one value at a path of keys set."""
    data = yaml.safe_load((ROOT / "serve.yaml").read_text())
    at = data
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    return data


APP = ("applications", 0)
POLICIES = (*APP, "deployments", 0, "user_config", "policies")


@pytest.mark.parametrize(
    "where, value, said",
    [
        ((*APP, "args", "engine", "max_runing"), 3, "applications.0.args.engine.max_runing: unknown key"),
        ((*APP, "deployments", 1, "num_replica"), 3, "num_replica: unknown key"),
        ((*APP, "deployments", 1, "name"), "Engin", "no deployment is called 'Engin'"),
        ((*APP, "deployments", 1, "num_replicas"), 0, "num_replicas"),
        ((*POLICIES, "ordering"), {"type": "sear"}, "unknown ordering 'sear'; nearest: seer"),
        ((*POLICIES, "ordering"), {"type": "seer", "explor": 1}, "explor"),
        ((*POLICIES, "placement"), {"type": "no_such.module:Thing"}, "cannot be imported"),
        (("proxy_location",), "EveryNode", "proxy_location"),
        (("http_options",), {"host": "1.2.3.4"}, "http_options.host"),
    ],
)
def test_bad_values_are_one_line_that_names_the_key(tmp_path, where, value, said):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(changed(where, value)))
    with pytest.raises(BadInput) as caught:
        load_config(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message and "\n" not in caught.value.message


def test_broken_yaml_names_the_line(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("applications:\n  - name: [\n")
    with pytest.raises(BadInput, match="line 3: not YAML"):
        load_config(path)


def test_a_missing_file_says_how_to_mend_it(tmp_path):
    with pytest.raises(BadInput, match="give an existing file with --config"):
        load_config(tmp_path / "none.yaml")


def test_what_is_null_in_the_arguments_stays_null_where_replicas_come_and_go():
    file = load_config(ROOT / "serve.elastic.yaml")
    args = file.application.args
    without = args.model_copy(update={"pool": None, "engine": args.engine.model_copy(update={"cores": None})})
    application = file.application.model_copy(update={"args": without})
    (said,) = declared(file.model_copy(update={"applications": (application,)}))["applications"]
    assert type(args).model_validate(said["args"]) == without
    assert all(value is not None for deployment in said["deployments"] for value in deployment.values())
