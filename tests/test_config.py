"""serve.yaml is strict: what Serve would ignore silently is an error here, on one line that names the key."""

from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from tailrace.app.cluster import declared
from tailrace.app.config import ServeFile, load_config
from tailrace.app.errors import BadInput
from tailrace.policies.families.tail import Hold

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
        ((*APP, "args", "engine", "max_runing"), 3, "did you mean max_running?"),
        (
            (*APP, "deployments", 1, "num_replica"),
            3,
            "applications.0.deployments.Engine.num_replica: unknown key; did you mean num_replicas?",
        ),
        ((*APP, "deployments", 0, "user_confg"), {}, "deployments.Coordinator.user_confg: unknown key; did you mean"),
        ((*POLICIES, "chunking"), {"type": "fixed", "chunk_token": 3}, "chunk_token: unknown key; did you mean chunk_"),
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


def test_keys_of_serve_pass_to_serve(tmp_path):
    data = yaml.safe_load((ROOT / "serve.yaml").read_text())
    application = data["applications"][0]
    keys = {
        "max_ongoing_requests": 9, "placement_group_bundles": [{"CPU": 1.0}, {"GPU": 8.0}],
        "placement_group_strategy": "PACK", "logging_config": {"log_level": "DEBUG"}, "max_replicas_per_node": 4,
    }  # fmt: skip
    application["deployments"][1] |= keys
    data["logging_config"] = application["logging_config"] = {"log_level": "ERROR"}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(data))
    found = declared(load_config(path))
    assert found["logging_config"] == found["applications"][0]["logging_config"] == {"log_level": "ERROR"}
    engine = next(each for each in found["applications"][0]["deployments"] if each["name"] == "Engine")
    assert {key: engine[key] for key in keys} == keys


def test_other_applications_of_the_file_pass_untouched(tmp_path):
    data = yaml.safe_load((ROOT / "serve.yaml").read_text())
    other = {"name": "reward", "import_path": "my_rewards:app", "route_prefix": "/reward", "args": {"a": None, "b": 1}}
    data["applications"].insert(0, other)
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(data))
    file = load_config(path)
    assert file.application.name == "tailrace"
    said = declared(file)["applications"]
    assert said[0]["args"] == {"a": None, "b": 1} and said[0]["route_prefix"] == "/reward"
    assert said[1]["args"]["drafter"] is None
    data["applications"].pop()
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(BadInput, match="exactly one application with import_path"):
        load_config(path)


@pytest.mark.live
def test_the_keys_that_pass_are_serves():
    from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema

    from tailrace.app.deployment_settings import ActorOptions, ServeKeys

    assert set(ServeKeys.model_fields) < set(DeploymentSchema.model_fields)
    assert set(ActorOptions.model_fields) == set(RayActorOptionsSchema.model_fields)


class WithDrafters(Hold):
    """A user's tail policy that asks for drafters by its capability."""

    wants_drafters: ClassVar[bool] = True


def test_a_users_tail_policy_asks_for_drafters_by_its_capability(tmp_path):
    data = changed((*POLICIES, "tail"), {"type": f"{__name__}:WithDrafters"})
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(BadInput, match=r"WithDrafters needs args\.drafter, and Drafter\.autoscaling_config"):
        load_config(path)
