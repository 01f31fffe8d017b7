"""serve.yaml is strict: what Serve would ignore silently is an error here, on one line that names the key."""

import re
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from pydantic import ValidationError

from tailrace.app.cluster import declared, needed_cpus
from tailrace.app.config import FileArgs, ServeFile, load_config, with_engine
from tailrace.app.deployment_options import all_options, options_of
from tailrace.app.errors import BadInput
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.policies.families.tail import Hold

ROOT = Path(__file__).parents[2]
SHIPPED = ["serve.yaml", "serve.elastic.yaml", "serve.gpu.yaml", "serve.http.yaml"]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_files_we_ship_load(name):
    application = load_config(ROOT / name).application
    assert application.import_path == "tailrace.app.build:build"
    assert application.args.replicas.max >= 2
    assert application.policies.ordering.type == "seer"
    assert application.policies.chunking.block_tokens == application.args.engine.block_tokens


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(path) == ServeFile()


def written(tmp_path: Path, data: dict) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def changed(where: tuple, value, name: str = "serve.yaml") -> dict:
    """A shipped file with one value at a path of keys set."""
    data = yaml.safe_load((ROOT / name).read_text())
    at = data
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    return data


APP = ("applications", 0)
ARGS = (*APP, "args")
COORDINATOR = (*APP, "deployments", 0)
POLICIES = (*COORDINATOR, "user_config", "policies")


@pytest.mark.parametrize(
    "where, value, said",
    [
        ((*ARGS, "engine", "max_runing"), 3, "applications.0.args.engine.max_runing: unknown key"),
        ((*ARGS, "engine", "max_runing"), 3, "did you mean max_running?"),
        ((*ARGS, "replica"), 3, "applications.0.args.replica: unknown key; did you mean replicas?"),
        ((*ARGS, "replicas"), 0, "args.replicas: give 1 or more, not 0"),
        ((*ARGS, "replicas"), {"min": 2, "max": 1}, "args.replicas: min is 2, more than max, 1"),
        ((*ARGS, "replicas"), {"min": 1}, "args.replicas.max: Field required"),
        (
            (*COORDINATOR, "user_confg"),
            {},
            "deployments.Coordinator.user_confg: unknown key; did you mean user_config?",
        ),
        (
            (*COORDINATOR, "ray_actor_options"),
            {"num_cpu": 1},
            "ray_actor_options.num_cpu: Serve's ray_actor_options has",
        ),
        ((*POLICIES, "chunking"), {"type": "fixed", "chunk_token": 3}, "chunk_token: unknown key; did you mean chunk_"),
        ((*COORDINATOR, "name"), "Cordinator", "no deployment is called 'Cordinator'"),
        ((*POLICIES, "ordering"), {"type": "sear"}, "unknown ordering 'sear'; nearest: seer"),
        ((*POLICIES, "ordering"), {"type": "seer", "explor": 1}, "explor"),
        ((*POLICIES, "placement"), {"type": "no_such.module:Thing"}, "cannot be imported"),
        ((*POLICIES, "tail"), "auto", "tail auto needs replicas that come and go: write `replicas: {min: 1, max: 2}`"),
        (("proxy_location",), "EveryNode", "proxy_location"),
    ],
)
def test_bad_values_are_one_line_that_names_the_key(tmp_path, where, value, said):
    path = written(tmp_path, changed(where, value))
    with pytest.raises(BadInput) as caught:
        load_config(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message and "\n" not in caught.value.message


OLD_SCALING = {"min_replicas": 1, "max_replicas": 4, "metrics_interval_s": 1, "look_back_period_s": 5}


@pytest.mark.parametrize(
    "where, value, said",
    [
        (("controller_options",), {}, "controller_options: no longer a key; remove it"),
        ((*APP, "logging_config"), {}, "applications.0.logging_config: no longer a key; remove it"),
        (
            (*APP, "deployments"),
            [{"name": "Engine", "num_replicas": 3}],
            "applications.0.deployments.Engine.num_replicas: no longer a key; write `replicas: 3` under args",
        ),
        (
            (*APP, "deployments"),
            [{"name": "Engine", "autoscaling_config": OLD_SCALING}],
            "deployments.Engine.autoscaling_config: no longer a key; write `replicas: {min: 1, max: 4}` under args",
        ),
        (
            (*APP, "deployments"),
            [{"name": "Drafter", "autoscaling_config": OLD_SCALING | {"min_replicas": 0, "max_replicas": 1}}],
            "Drafter.autoscaling_config: no longer a key; write `replicas: {min: 0, max: 1}` under args.drafter",
        ),
        (
            (*COORDINATOR, "user_config", "replicas"),
            {"min": 2, "max": 3},
            "user_config.replicas: no longer a key; remove it, and write `replicas: {min: 2, max: 3}` under args",
        ),
        (
            (*COORDINATOR, "max_ongoing_requests"),
            9,
            "max_ongoing_requests: no longer a key; remove it: its value is fix",
        ),
        (
            (*COORDINATOR, "max_replicas_per_node"),
            9,
            "max_replicas_per_node: no longer a key; remove it: Serve's defau",
        ),
        ((*ARGS, "context", "flush_s"), 0.1, "args.context.flush_s: no longer a key; remove it: it is fixed at 0.05"),
        ((*ARGS, "pool", "retry_s"), 2.0, "args.pool.retry_s: no longer a key; remove it: it is fixed at 1.0"),
        ((*ARGS, "pool", "buffer_mib"), 2, "buffer_mib: no longer a key; remove it: it is 64 on CPUs and 512 on GPUs"),
        (
            (*ARGS, "engine", "draft", "paths"),
            2,
            "args.engine.draft.paths: no longer a key; remove it: one path of a draft is verified",
        ),
        ((*ARGS, "engine", "draft", "index"), {}, "args.engine.draft.index: no longer a key; remove it: the index has"),
        ((*ARGS, "engine", "block_tokens"), 16, "block_tokens: no longer a key; remove it: it is 32 on CPUs and 16 on"),
        (
            (*ARGS, "drafter"),
            {"model": "m", "patience_s": 1},
            "args.drafter.patience_s: no longer a key; remove it: it is",
        ),
        (
            (*POLICIES, "prefetch"),
            "off",
            "policies.prefetch: no longer a key; remove it: it is next_up, and set_",
        ),
        (
            (*POLICIES, "ordering"),
            {"type": "seer", "explore": 0.2},
            "policies.ordering.explore: no longer a key; remove",
        ),
        (
            (*POLICIES, "chunking"),
            {"type": "fixed", "block_tokens": 32},
            "chunking.block_tokens: no longer a key; remo",
        ),
        (
            (*COORDINATOR, "user_config", "quotas"),
            {"max_result_bytes": 1},
            "quotas.max_result_bytes: no longer a key; re",
        ),
    ],
)
def test_an_old_key_is_one_line_that_says_what_to_write(tmp_path, where, value, said):
    path = written(tmp_path, changed(where, value))
    with pytest.raises(BadInput) as caught:
        load_config(path)
    assert said in caught.value.message and "\n" not in caught.value.message


def test_the_four_old_blocks_of_elastic_replicas_are_one_line(tmp_path):
    data = changed((*APP, "autoscaling_policy"), {"policy_function": "tailrace.deployments.autoscaler:AsCoordinated"})
    deployments = data["applications"][0]["deployments"]
    deployments[0] |= {"autoscaling_config": OLD_SCALING | {"max_replicas": 1}}
    deployments[0]["user_config"]["replicas"] = {"min": 1, "max": 4}
    deployments.append({"name": "Engine", "autoscaling_config": OLD_SCALING})
    with pytest.raises(BadInput, match=r"autoscaling_policy: no longer a key; write `replicas: \{min: 1, max: 4\}`"):
        load_config(written(tmp_path, data))


def test_old_keys_of_a_gateway_are_refused(tmp_path):
    gateway = ("applications", 1)
    for where, value, said in (
        ((*gateway, "deployments"), [{"name": "Gateway"}], "applications.1.deployments: no longer a key; write"),
        ((*gateway, "args", "conversation_tokens"), 0, "applications.1.args.conversation_tokens: no longer a key"),
    ):
        with pytest.raises(BadInput, match=said):
            load_config(written(tmp_path, changed(where, value, "serve.http.yaml")))


def test_a_builder_of_a_file_refuses_constants_as_the_file_does():
    """Serve alone reads a file for `serve deploy`."""
    with pytest.raises(ValidationError, match=r"context\.flush_s: no longer a key; remove it: it is fixed at 0\.05"):
        FileArgs.model_validate({"context": {"flush_s": 0.1}})
    assert FileArgs.model_validate({"replicas": 3}).replicas.max == 3


def test_broken_yaml_names_the_line(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("applications:\n  - name: [\n")
    with pytest.raises(BadInput, match="line 3: not YAML"):
        load_config(path)


def test_a_missing_file_says_how_to_mend_it(tmp_path):
    with pytest.raises(BadInput, match="give an existing file with --config"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_file_and_what_is_declared_to_serve_are_the_same(name):
    file = load_config(ROOT / name)
    again = ServeFile.model_validate(declared(file))
    ours, same = file.application, again.application
    assert (same.args, same.user_config, again.gateway) == (ours.args, ours.user_config, file.gateway)


def test_what_is_null_in_the_arguments_stays_null():
    file = load_config(ROOT / "serve.elastic.yaml")
    engine = file.application.args.engine.model_copy(update={"cores": None})
    application = file.application.with_args(pool=None, engine=engine)
    (said,) = declared(file.model_copy(update={"applications": (application,)}))["applications"]
    assert FileArgs.model_validate(said["args"]).model_dump() == application.args.model_dump()
    assert all(value is not None for deployment in said["deployments"] for value in deployment.values())


def test_a_constant_that_code_has_changed_fits_no_file():
    file = with_engine(load_config(), {"draft": DraftConfig(draft_tokens=5)})
    with pytest.raises(ValueError, match=r"DraftConfig\.draft_tokens is set in code; no file can have it"):
        declared(file)
    context = file.application.with_args(context=ContextConfig(flush_s=1.0))
    assert context.args.context.flush_s == 1.0


def test_a_chunk_of_any_length_stays_so(tmp_path):
    data = changed((*POLICIES, "chunking"), {"type": "fixed", "chunk_tokens": None})
    application = load_config(written(tmp_path, data)).application
    chunking = all_options(application)["Coordinator"]["user_config"]["policies"]["chunking"]
    assert application.policies.chunking.chunk_tokens is chunking["chunk_tokens"] is None


def test_a_fixed_number_of_replicas_needs_no_autoscaling():
    options = options_of(load_config().application.args)
    assert options["Engine"]["num_replicas"] == 2
    assert not any("autoscaling_config" in each for each in options.values()) and "Drafter" not in options


def test_replicas_that_come_and_go_are_serves_autoscaling_by_the_coordinator():
    options = options_of(load_config(ROOT / "serve.elastic.yaml").application.args)
    engine, coordinator = (options[name]["autoscaling_config"] for name in ("Engine", "Coordinator"))
    limits = ("min_replicas", "max_replicas", "initial_replicas")
    assert [engine[key] for key in limits] == [1, 2, 2] and [coordinator[key] for key in limits] == [1, 1, 1]
    assert engine["policy"] == coordinator["policy"]
    assert "num_replicas" not in options["Engine"]


def test_resources_follow_from_the_engine_and_a_file_may_replace_them(tmp_path):
    assert options_of(load_config(ROOT / "serve.gpu.yaml").application.args)["Engine"]["ray_actor_options"] == {
        "num_cpus": 4,
        "num_gpus": 1,
    }
    data = changed((*ARGS, "engine", "cores"), 3)
    assert options_of(load_config(written(tmp_path, data)).application.args)["Engine"]["ray_actor_options"] == {
        "num_cpus": 3
    }
    data["applications"][0]["deployments"].append({"name": "Engine", "ray_actor_options": {"num_cpus": 0.5}})
    application = load_config(written(tmp_path, data)).application
    assert all_options(application)["Engine"]["ray_actor_options"] == {"num_cpus": 0.5}
    data = yaml.safe_load((ROOT / "serve.gpu.yaml").read_text())
    data["applications"][0]["deployments"].append({"name": "Engine", "ray_actor_options": {"num_cpus": 8}})
    with pytest.raises(BadInput, match=r"Engine\.ray_actor_options: add num_gpus: 1"):
        load_config(written(tmp_path, data))


def test_other_applications_of_the_file_pass_untouched(tmp_path):
    data = yaml.safe_load((ROOT / "serve.yaml").read_text())
    other = {"name": "reward", "import_path": "my_rewards:app", "route_prefix": "/reward", "args": {"a": None, "b": 1}}
    data["applications"].insert(0, other)
    path = written(tmp_path, data)
    file = load_config(path)
    assert file.application.name == "tailrace"
    said = declared(file)["applications"]
    assert said[0] == other
    assert said[1]["args"]["drafter"] is None
    data["applications"].pop()
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(BadInput, match="exactly one application with import_path"):
        load_config(path)


class WithDrafters(Hold):
    """A user's tail policy that asks for drafters by its capability."""

    wants_drafters: ClassVar[bool] = True


def test_a_users_tail_policy_asks_for_drafters_by_its_capability(tmp_path):
    data = changed((*POLICIES, "tail"), {"type": f"{__name__}:WithDrafters"})
    with pytest.raises(BadInput, match=r"WithDrafters needs args\.drafter, with `replicas: \{min: 0, max: 1\}` there"):
        load_config(written(tmp_path, data))


REMOVED = (ROOT / "tests" / "data" / "removed_keys.txt").read_text().split()
"""Keys of an older version: of a deployment with its name in brackets, of a policy as policies.FAMILY.MEMBER.KNOB."""


def with_old_key(key: str) -> dict:
    """A file with one old key, and else with what that key needs beside it."""
    service = {"name": "tailrace", "args": {"drafter": {"model": "m"}}}
    file = {"applications": [service]}
    deployment = re.fullmatch(r"applications\.deployments\[(\w+)\]\.(.*)", key)
    if key.startswith("policies."):
        _, family, member, knob = key.split(".")
        policies = {family: {"type": member, knob: 1}}
        service["deployments"] = [{"name": "Coordinator", "user_config": {"policies": policies}}]
        return file
    if deployment:
        at, rest = {"name": deployment[1]}, deployment[2]
        service["deployments"] = [at]
    elif key.startswith("applications."):
        at, rest = service, key.partition(".")[2]
        if rest == "args.conversation_tokens":
            at = {"name": "gateway", "import_path": "tailrace.app.gateway.build:build"}
            file |= {"applications": [service, at]}
    else:
        at, rest = file, key
    *places, last = rest.split(".")
    for place in places:
        at = at.setdefault(place, {})
    at[last] = 1
    return file


@pytest.mark.parametrize("key", REMOVED)
def test_every_key_of_an_older_version_has_its_line(tmp_path, key):
    with pytest.raises(BadInput) as caught:
        load_config(written(tmp_path, with_old_key(key)))
    assert ": no longer a key; " in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("given", "cpus"),
    [
        ({}, 2),
        ({"Engine": {"num_cpus": 0.75}}, 2),  # 1.5 cores
        ({"Engine": {"num_cpus": 0}}, 1),
        ({"Engine": {"memory": 1e9}}, 2),  # Serve's own default is a core
        ({"Coordinator": {"num_cpus": 1}}, 3),
    ],
)
def test_a_local_cluster_has_room_for_every_replica(tmp_path, given, cpus):
    deployments = [{"name": name, "ray_actor_options": options} for name, options in given.items()]
    application = load_config(written(tmp_path, changed((*APP, "deployments"), deployments))).application
    assert application.args.replicas.max == 2 and needed_cpus(application) == cpus
