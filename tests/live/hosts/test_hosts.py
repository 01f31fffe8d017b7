"""The user's own path: `ray up` of a cluster file on three hosts, `serve deploy`, rollouts by a driver on the head.

Then hosts are cut off, and killed whole, the head's too. Every rollout has the tokens of the undisturbed one.
"""

import json
import subprocess

import pytest
from waiting import until

from hosts.cluster import UserCluster

pytestmark = pytest.mark.hosts
SOME_GROUPS = 3
SHORT_S = 10
"""Ray 2.60 gives a node that does not answer up about 30 s after its last answer."""


def groups_of(cluster: UserCluster, name: str) -> dict[str, list[dict]]:
    """Samples by prompt id, of a rollout on the head."""
    file = cluster.head.path(f"{name}.jsonl")
    lines = (
        [json.loads(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        if file.exists()
        else []
    )
    return {line["prompt_id"]: line["samples"] for line in lines}


def tokens_of(groups: dict[str, list[dict]]) -> dict[str, list[list[int]]]:
    return {name: [sample["token_ids"] for sample in samples] for name, samples in groups.items()}


def ended(run: subprocess.Popen) -> str:
    output, errors = run.communicate(timeout=600)
    assert run.returncode == 0, output[-2000:] + errors[-2000:]
    return output


def await_some_groups(cluster: UserCluster, name: str) -> None:
    until(lambda: len(groups_of(cluster, name)) >= SOME_GROUPS, 300.0)


def replicas_of(groups: dict[str, list[dict]]) -> set[str]:
    return {segment["replica_id"] for samples in groups.values() for s in samples for segment in s["segments"]}


@pytest.fixture(scope="session")
def plain(cluster) -> dict[str, list[list[int]]]:
    """Tokens of the undisturbed rollout."""
    ended(cluster.rollout("plain"))
    groups = groups_of(cluster, "plain")
    assert len(groups) == 16
    assert len(replicas_of(groups)) == 2
    return tokens_of(groups)


def test_kv_crosses_hosts(cluster, plain):
    pool = json.loads(cluster.on_head(".venv/bin/python -m tailrace pool status --json"))
    assert {node["host"] for node in pool["status"]["store_nodes"]} == {host.address for host in cluster.workers}
    assert pool["counts"]["pool_tokens"] > 0
    received = [host.received_bytes() for host in cluster.workers]
    assert min(received) > 500 * pool["token_bytes"], f"too little for KV: {received}"


def test_ranks_on_two_hosts_publish_to_engines_on_two_hosts(cluster, plain, model_dir):
    received = [host.received_bytes() for host in cluster.workers]
    apart = cluster.publish(cluster.workers, model_dir, "fsdp2_2", 1)
    size = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    grown = [host.received_bytes() - before for host, before in zip(cluster.workers, received, strict=True)]
    assert max(grown) > 0.9 * size, "one host's engine pulls the whole"
    assert sum(grown) > 1.4 * size, "the other one gets the half of a rank"
    alone = cluster.publish([cluster.head], model_dir, "one", 2)  # a host without an engine
    assert {row["digest"] for row in apart + alone} == {apart[0]["digest"]}
    check = cluster.asked("check_weights_blocking()")
    assert check["version"] == 2 and len(check["replicas"]) == 2 and not check["unlike"] and not check["problems"]
    cluster.asked(f"update_weights_blocking(3, {str(model_dir)!r})")  # the next tests may lose the hosts of the others
    ended(cluster.rollout("published"))
    assert tokens_of(groups_of(cluster, "published")) == plain


def test_a_short_partition_costs_no_token(cluster, plain):
    run = cluster.rollout("parted")
    await_some_groups(cluster, "parted")
    cluster.workers[0].part()
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(SHORT_S)
    cluster.workers[0].heal()
    ended(run)
    assert tokens_of(groups_of(cluster, "parted")) == plain


def test_a_host_that_is_cut_off_is_replaced_and_comes_back(cluster, plain):
    run = cluster.rollout("cut-off")
    await_some_groups(cluster, "cut-off")
    cluster.workers[0].part()
    cluster.await_nodes(2)
    cluster.workers[0].heal()
    ended(run)
    assert tokens_of(groups_of(cluster, "cut-off")) == plain
    cluster.await_nodes(3)
    cluster.await_application()


def test_the_coordinators_host_dies_and_costs_no_token(cluster, plain):
    """An engine dies with it; the other one stays."""
    run = cluster.rollout("dead-host")
    await_some_groups(cluster, "dead-host")
    dead, left = sorted(cluster.workers, key=lambda host: host.process("ServeReplica:tailrace:Coordinator") == "")
    engine = left.process("ServeReplica:tailrace:Engine")
    dead.kill()
    ended(run)
    assert tokens_of(groups_of(cluster, "dead-host")) == plain
    assert left.process("ServeReplica:tailrace:Engine") == engine
    dead.start()
    cluster.await_nodes(3)
    cluster.await_application()


def test_the_heads_host_dies_and_the_rollout_is_taken_up_again(cluster, plain):
    run = cluster.rollout("dead-head")
    await_some_groups(cluster, "dead-head")
    cluster.head.kill()
    run.communicate(timeout=60)
    before = groups_of(cluster, "dead-head")
    assert SOME_GROUPS <= len(before) < len(plain)
    cluster.head.start()
    cluster.up()
    cluster.deploy()
    ended(cluster.rollout("dead-head"))
    after = groups_of(cluster, "dead-head")
    assert {name: after[name] for name in before} == before
    assert tokens_of(after) == plain
