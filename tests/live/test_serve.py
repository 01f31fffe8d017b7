"""The commands as a user types them: serve, the README's driver, rollout with resume and trace, and the way down."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import until

from tailrace.app.config import DEFAULT_CONFIG
from tailrace.deployments.staging.slots import Slots, service_name
from tailrace.kvpool.programs import free_port
from tailrace.lab.verification.leftovers import processes_of

ROOT = Path(__file__).resolve().parents[2]
FIRST = '{"prompt_id": "a", "text": "One, two,"}\n'
SECOND = '{"prompt_id": "b", "messages": [{"role": "user", "content": "Hi"}]}\n'


def environment(port: int) -> dict[str, str]:
    """A driver's: the cluster's address and its token."""
    return os.environ | {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": f"127.0.0.1:{port}"}


EXAMPLE = {"PYTHONPATH": str(ROOT / "examples" / "my_policy")}
"""Where the service finds the package that it is allowed to import."""

STRANGER = """
from my_policy import ShortestFirst
class Mine(ShortestFirst):
    'Of a package that the service was not given.'
"""

OTHER_POLICIES = """
from tailrace import PromptGroup, RolloutBatch, connect
from tailrace.app.calls.refused import PoliciesRejected
from tailrace.policies.families.allowed_code import allow_code
from tailrace.policies.families.registry import Policies
allow_code("my_policy", "stranger")
client = connect("auto")
client.set_policies_blocking(Policies(ordering={"type": "my_policy:ShortestFirst", "args": {"head_start": 8}}))
groups = (PromptGroup(prompt_id="p", text="One, two,", samples=1, max_tokens=4),)
(group,) = client.rollout_blocking(RolloutBatch(batch_id="by-my-policy", groups=groups, seed=1))
print(client.status_blocking().policies["ordering"])
try:
    client.set_policies_blocking(Policies(ordering="stranger:Mine"))
except PoliciesRejected as error:
    print("refused:", error)
client.set_policies_blocking(Policies())
"""

MASTERS: list[str] = []
"""Addresses of pool masters that tests have met: none may be left in the end."""


def pool_processes() -> list[int]:
    return [pid for master in MASTERS for pid in processes_of(master)]


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory):
    """A service started by the command; its port. As serve.yaml, but one replica of a tiny model: commands are tested
    here, and `deployed/` tests the default file's service."""
    port, dashboard = free_port("127.0.0.1"), free_port("127.0.0.1")
    file = yaml.safe_load(DEFAULT_CONFIG.read_text())
    (application,) = file["applications"]
    application["args"]["engine"]["model"] = str(tiny_model)
    application["args"]["replicas"] = 1
    config = tmp_path_factory.mktemp("served") / "serve.yaml"
    config.write_text(yaml.safe_dump(file))
    arguments = ("-m", "tailrace", "serve", "--config", str(config), "--port", str(port))
    arguments += ("--dashboard-port", str(dashboard), "--allow-code", "my_policy")
    process = subprocess.Popen(
        (sys.executable, *arguments), cwd=ROOT, env=os.environ | EXAMPLE, stdout=subprocess.PIPE, text=True
    )
    said = process.stdout.readline()
    assert f"127.0.0.1:{port}" in said, said
    yield port
    slots = Slots(service_name(application["name"], f"127.0.0.1:{port}"))
    slots.part.mkdir()  # as a trainer leaves that dies while it publishes
    process.send_signal(signal.SIGTERM)  # as Ctrl-C; a shell's background jobs are deaf to SIGINT
    assert process.wait(300) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the head is gone"
    assert MASTERS and not pool_processes(), "and its pool with it"
    assert not list(slots.root.glob(f"tailrace-{slots.service}*")), "and memory of weights"


def run(port: int, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(
        (sys.executable, *arguments), cwd=ROOT, env=environment(port), capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_readme_driver_runs(served):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = next(one for one in examples if re.search(r"^(from|import) tailrace\b", one, re.MULTILINE))
    lines = run(served, "-c", example).stdout.strip().splitlines()
    assert len(lines) == 8 and all(re.match(r"sky \d (stop|length) \{0\} -\d+\.\d+", line) for line in lines)


def test_rollout_resumes_and_traces(served, tmp_path):
    prompts, out, trace = tmp_path / "p.jsonl", tmp_path / "out.jsonl", tmp_path / "trace.json"
    command = ("-m", "tailrace", "rollout", "--prompts", str(prompts), "--out", str(out), "--samples", "3",
               "--max-tokens", "80", "--address", f"127.0.0.1:{served}", "--json")  # fmt: skip
    prompts.write_text(FIRST)
    first = json.loads(run(served, *command, "--trace", str(trace)).stdout.splitlines()[-1])
    assert first["groups"] == 1 and first["samples"] == 3 and first["failed_samples"] == 0
    processes = json.loads(trace.read_text())["resourceSpans"]
    names = [span["name"].split()[0] for one in processes for of in one["scopeSpans"] for span in of["spans"]]
    assert names.count("driver") == names.count("rollout") == names.count("group") == 1
    assert names.count("text_completion") == names.count("engine") >= 3
    prompts.write_text(FIRST + SECOND)
    second = json.loads(run(served, *command).stdout.splitlines()[-1])
    assert (second["groups"], second["already_done_groups"]) == (1, 1)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt_id"] for line in lines] == ["a", "b"]
    assert all(len(line["samples"]) == 3 for line in lines)


def test_policies_of_the_package_on_the_command_line_are_taken_and_a_stranger_s_are_not(served, tmp_path):
    (tmp_path / "stranger.py").write_text(STRANGER)
    both = {"PYTHONPATH": f"{EXAMPLE['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        (sys.executable, "-c", OTHER_POLICIES), cwd=ROOT, env=environment(served) | both, capture_output=True,
        text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    now, refused = done.stdout.strip().splitlines()[-2:]
    assert "my_policy:ShortestFirst" in now
    assert "code of package 'stranger' is not allowed and was not imported" in refused


def test_the_pool_is_seen_and_drained(served):
    address = ("--address", f"127.0.0.1:{served}", "--json")

    def look() -> dict:
        return json.loads(run(served, "-m", "tailrace", "pool", "status", *address).stdout.splitlines()[-1])

    # The rollouts before leave nothing, but a release may still be under way.
    view = until(lambda: (seen := look())["status"] and not seen["status"]["keys"] and seen)
    MASTERS.append(view["status"]["master_address"])
    assert view["problems"] == {} and len(view["status"]["store_nodes"]) == 1
    assert view["keys_by_version"] == {}
    assert view["counts"]["recomputed_tokens.new"] > 0
    assert len(pool_processes()) == 2
    drained = run(served, "-m", "tailrace", "pool", "drain", *address).stdout.splitlines()[-1]
    assert json.loads(drained) == {"removed_keys": 0}


def test_an_address_without_the_service_is_bad_input(served, tmp_path):
    config = tmp_path / "other.yaml"
    config.write_text("applications: [{name: elsewhere}]\n")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(FIRST + SECOND)
    command = ("-m", "tailrace", "rollout", "--prompts", str(prompts), "--out", str(tmp_path / "o"))
    error = run(served, *command, "--config", str(config), "--address", f"127.0.0.1:{served}", code=2).stderr
    assert "no application 'elsewhere' there; run `serve deploy serve.yaml` first" in error
