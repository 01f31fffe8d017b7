"""Files of deploy/: the manifests have the shape of KubeRay's types, nothing listens for all, every start has the
token, no file holds a secret, and the Slurm script starts each node of an allocation once and leaves nothing.

Both manifests were once validated against the CRDs of KubeRay 1.6.2 and 1.7.0, unknown keys refused. `SHAPE` is the
part of that which may be kept here: the keys that they use.
"""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tailrace.app.config import load_config
from tailrace.app.deployment_options import all_options
from tailrace.app.ray_settings import FRUGAL

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
KUBERAY = {path.stem: path for path in (DEPLOY / "kuberay").glob("*.yaml")}

PROBE = {"httpGet": {"path": str, "port": int}} | dict.fromkeys(
    ("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold"), int
)
CONTAINER = {
    "name": str, "image": str, "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
    "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
    "resources": {"requests": {"*": str}, "limits": {"*": str}},
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}], "readinessProbe": PROBE,
}  # fmt: skip
POD = {
    "metadata": {"labels": {"*": str}},
    "spec": {
        "automountServiceAccountToken": bool,
        "terminationGracePeriodSeconds": int,
        "securityContext": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), int)
        | {"runAsNonRoot": bool, "seccompProfile": {"type": str}},
        "containers": [CONTAINER],
        "volumes": [
            {
                "name": str,
                "emptyDir": {"medium": str, "sizeLimit": str},
                "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
            }
        ],
    },
}
CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": str, "secretName": str},
    "headGroupSpec": {"rayStartParams": {"*": str}, "template": POD},
    "workerGroupSpecs": [
        dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int)
        | {"groupName": str, "rayStartParams": {"*": str}, "template": POD}
    ],
}
SERVICE = {
    "excludeHeadPodFromServeSvc": bool,
    "upgradeStrategy": {"type": str},
    "serveConfigV2": str,
    "rayClusterConfig": CLUSTER,
}
SHAPE = {"RayCluster": CLUSTER, "RayService": SERVICE}
"""By kind the keys of `spec`; `*`: any key."""


def unlike(value, shape, place="") -> list[str]:
    """Places whose key or type is not the shape's."""
    if isinstance(shape, type):
        return [] if type(value) is shape else [place]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [place]
        return [bad for number, one in enumerate(value) for bad in unlike(one, shape[0], f"{place}[{number}]")]
    if not isinstance(value, dict):
        return [place]
    found = []
    for key, one in value.items():
        of_key = shape.get(key, shape.get("*"))
        found += [f"{place}.{key}"] if of_key is None else unlike(one, of_key, f"{place}.{key}")
    return found


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all(KUBERAY[name].read_text()))


def cluster_of(document: dict) -> dict:
    return document["spec"].get("rayClusterConfig", document["spec"])


@pytest.fixture(params=sorted(KUBERAY))
def manifest(request):
    return documents(request.param)[0]


@pytest.fixture
def pods(manifest):
    cluster = cluster_of(manifest)
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_a_manifest_has_the_operators_keys(manifest):
    assert manifest["apiVersion"] == "ray.io/v1"
    assert unlike(manifest["spec"], SHAPE[manifest["kind"]]) == []


def test_a_wrong_key_and_a_wrong_type_are_found(manifest):
    cluster_of(manifest)["headGroupSpec"]["template"]["spec"]["containers"][0]["imagge"] = "x"
    cluster_of(manifest)["workerGroupSpecs"][0]["replicas"] = "1"
    assert [place.rpartition(".")[2] for place in unlike(manifest["spec"], SHAPE[manifest["kind"]])] == [
        "imagge",
        "replicas",
    ]


def test_every_pod_has_the_token_from_a_secret_that_no_file_holds(manifest):
    assert cluster_of(manifest)["authOptions"] == {"mode": "token", "secretName": "tailrace-token"}
    kinds = {document["kind"] for name in KUBERAY for document in documents(name)}
    assert kinds == {"RayCluster", "RayService", "NetworkPolicy"}
    assert not [path for path in FILES if re.search(r"(?i)(token|password|secret)\s*[:=]\s*[\"']?\w{16}", text(path))]


def text(path: Path) -> str:
    return path.read_text()


def test_nothing_listens_on_every_interface(manifest):
    assert not [path for path in FILES if "0.0.0.0" in text(path) or "::" in re.sub(r"::\w+", "", text(path))]
    cluster = cluster_of(manifest)
    assert cluster["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "$POD_IP"
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    assert all(group["rayStartParams"]["node-ip-address"] == "$POD_IP" for group in groups)


def test_only_the_clusters_pods_reach_its_ports(pods):
    for name in KUBERAY:
        policy = documents(name)[1]["spec"]
        chosen = policy["podSelector"]["matchLabels"]
        assert all(chosen.items() <= pod["metadata"]["labels"].items() for pod in pods)
        assert all("app.kubernetes.io/name" not in pod["metadata"]["labels"] for pod in pods)  # the head's service asks
        assert policy["ingress"][0]["from"] == [{"podSelector": policy["podSelector"]}]
        assert [one.get("ports") for one in policy["ingress"][1:]] == [[{"port": 8265}]]


def test_every_pod_runs_without_root_and_saves_processor_time(pods):
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        environment = {one["name"]: one.get("value") for one in container["env"]}
        assert FRUGAL.items() <= environment.items()
        assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_the_service_runs_on_the_same_cluster_and_asks_no_proxy():
    service, cluster = documents("rayservice")[0]["spec"], documents("raycluster")[0]["spec"]
    (worker,) = service["rayClusterConfig"]["workerGroupSpecs"]
    probe = worker["template"]["spec"]["containers"][0].pop("readinessProbe")
    assert probe["httpGet"] == {"path": "/api/healthz", "port": 52365}  # Ray's node, in place of Serve's proxy
    assert service["excludeHeadPodFromServeSvc"] is True
    assert service["rayClusterConfig"] == cluster


def test_the_service_of_the_manifest_is_that_of_serve_gpu_yaml_and_fits_its_workers(tmp_path):
    spec = documents("rayservice")[0]["spec"]
    (tmp_path / "serve.yaml").write_text(spec["serveConfigV2"])
    file, usual = load_config(tmp_path / "serve.yaml"), load_config(ROOT / "serve.gpu.yaml")
    assert file.proxy_location == "Disabled"
    pool = usual.application.args.pool.model_copy(update={"protocol": "tcp"})
    assert file.application.args == usual.application.args.model_copy(update={"pool": pool})
    assert file.application.deployments == usual.application.deployments
    engine, (worker,) = all_options(file.application)["Engine"], spec["rayClusterConfig"]["workerGroupSpecs"]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus, cpus = worker["replicas"] * int(limits["nvidia.com/gpu"]), worker["replicas"] * int(limits["cpu"])
    assert engine["num_replicas"] * engine["ray_actor_options"]["num_gpus"] <= gpus
    assert engine["num_replicas"] * engine["ray_actor_options"]["num_cpus"] <= cpus
    assert file.application.args.pool.dram_gib < int(limits["memory"].removesuffix("Gi"))


def test_rays_version_is_the_pinned_one(manifest):
    extras = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    assert f"ray[serve]=={cluster_of(manifest)['rayVersion']}" in extras["gpu"]


def test_an_image_runs_without_root_and_installs_from_the_locks():
    stages = re.split(r"^FROM ", text(DEPLOY / "docker" / "Dockerfile"), flags=re.MULTILINE)[1:]
    named = {stage.splitlines()[0].rpartition(" AS ")[2]: stage for stage in stages}
    for target in ("cpu", "gpu"):
        assert re.findall(r"^USER (.+)$", named[target], re.MULTILINE) == ["1000:1000"]
        assert "RAY_AUTH_MODE=token" in named[target]
        locks = re.findall(r"-r /tmp/requirements/(\S+)", named[f"installed-{target}"])
        assert locks == (["cpu.txt", "torch.txt"] if target == "cpu" else ["gpu.txt"])
        assert named[f"installed-{target}"].count("--require-hashes") == len(locks)
    context = set(text(ROOT / ".dockerignore").splitlines())
    assert {"*", "!pyproject.toml", "!tailrace", "!serve*.yaml", "!README.md", "!LICENSE"} <= context
    assert "!.git" not in context


NODES = ("one", "two", "three")
STUBS = {
    "scontrol": 'printf "%s\\n" $FAKE_NODES',
    "srun": 'while [[ "$1" == --* ]]; do case "$1" in --nodelist=*) export ON="${1#*=}";; esac; shift; done; exec "$@"',
    "hostname": 'echo "$ON.address fe80"',
    "ray": '[ "$1" = health-check ] && { [ -e "$FAKE/head" ]; exit; }; [ "$2" = --head ] && touch "$FAKE/head"; '
    'stat -c "%a $RAY_AUTH_MODE" "$RAY_AUTH_TOKEN_PATH" >"$FAKE/mode.$ON"; '
    'wc -c <"$RAY_AUTH_TOKEN_PATH" >"$FAKE/size"; '
    'echo "$@" >"$FAKE/started.$ON"; trap "rm $FAKE/started.$ON; mv $FAKE/args.$ON $FAKE/ended.$ON; exit" TERM; '
    'echo "$@" >"$FAKE/args.$ON"; while true; do sleep 0.05; done',
    "serve": 'echo "$@" >"$FAKE/served"',
}
"""Programs of a fake allocation: those of Slurm run what they are given here, Ray's write down how they were called."""


@pytest.fixture
def allocation(tmp_path):
    """The environment of a job on three nodes, in a checkout's folder."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, body in STUBS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node[1-3]"}
    return os.environ | job | {"FAKE": str(tmp_path), "FAKE_NODES": " ".join(NODES)}


def slurm(allocation, *driver: str) -> subprocess.CompletedProcess:
    script = DEPLOY / "slurm" / "tailrace.sbatch"
    return subprocess.run(
        (script, *driver), env=allocation, capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )


def test_a_job_starts_every_node_once_with_its_own_token_and_leaves_nothing(allocation, tmp_path):
    all_run = 'for node in $FAKE_NODES; do until [ -e "$FAKE/args.$node" ]; do sleep 0.05; done; done'
    done = slurm(allocation, "bash", "-c", f'echo "driver at $RAY_ADDRESS, $RAY_AUTH_MODE"; {all_run}; exit 3')
    assert done.returncode == 3, done.stderr
    assert "driver at one.address:24567, token" in done.stdout
    ended = {node: (tmp_path / f"ended.{node}").read_text() for node in NODES}
    assert "--head --block --node-ip-address=one.address --port=24567 --dashboard-host=127.0.0.1" in ended["one"]
    for node in NODES[1:]:
        assert f"--node-ip-address={node}.address --address=one.address:24567" in ended[node]
    assert {(tmp_path / f"mode.{node}").read_text() for node in NODES} == {"600 token\n"}
    assert int((tmp_path / "size").read_text()) == 64
    assert (tmp_path / "served").read_text() == "deploy --address http://127.0.0.1:24568 serve.gpu.yaml\n"
    assert not list(tmp_path.glob("tailrace-*")) and not list(tmp_path.glob("started.*"))


def test_a_job_that_is_requeued_runs_beside_what_its_first_run_left(allocation, tmp_path):
    (tmp_path / "tailrace-1234567").mkdir()
    (tmp_path / "tailrace-1234567" / "token").write_text("of the first run")
    done = slurm(allocation, "bash", "-c", 'wc -c <"$RAY_AUTH_TOKEN_PATH"')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "64" and not list(tmp_path.glob("tailrace-*"))


def test_a_job_without_a_driver_is_refused(allocation, tmp_path):
    done = slurm(allocation)
    assert done.returncode == 2
    assert "driver's command" in done.stderr and not list(tmp_path.glob("tailrace-*"))


def test_a_job_whose_head_does_not_start_says_why(allocation, tmp_path):
    (tmp_path / ".venv" / "bin" / "ray").write_text("#!/bin/sh\necho port taken; exit 1\n")
    done = slurm(allocation, "true")
    assert done.returncode == 1
    assert "port taken" in done.stderr and not list(tmp_path.glob("tailrace-*"))
