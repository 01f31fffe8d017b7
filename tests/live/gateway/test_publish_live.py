"""Weights from two and four ranks of a trainer, on a real service: as from one process to the byte, or not at all."""

import json
from urllib.parse import urlsplit

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from tailrace import saved_weights
from tailrace.app.weights.over_http import HttpWeights
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.staging.slots import Slots
from tailrace.deployments.staging.stage import Stage
from tailrace.lab.benchmarks.live.rank_process import CHANGE, HTTP
from tailrace.lab.benchmarks.live.ranks import ranks_here
from tailrace.lab.benchmarks.live.slow_link import SlowLink

GROUP = PromptGroup(prompt_id="p", text="Count to three:", samples=2, max_tokens=16)


def digest_of(model_dir, changes: int, root) -> str:
    """The digest of the weights that one process would send."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    with torch.no_grad():
        for _ in range(changes):
            for parameter in model.parameters():
                parameter.mul_(CHANGE)
    return one_process(model, root)


def one_process(model, root) -> str:
    stage = Stage(Slots("one-process", root), 1, (0, ""))
    for name, tensor in saved_weights(model):
        stage.add(name, tensor)
    return stage.seal().digest


def tokens(client, name: str) -> list:
    (group,) = client.rollout_blocking(RolloutBatch(batch_id=name, groups=(GROUP,)))
    return [(sample.token_ids, sample.segments[-1].weights_version) for sample in group.samples]


USUAL = "fsdp2_2", f"fsdp2_2{HTTP}"
"""The gateway takes 20 kB in a body: over HTTP a rank's half of the embedding comes in hundreds."""

LAYOUTS = [*USUAL, *(pytest.param(name, marks=pytest.mark.long) for name in ("tensor_2", "fsdp2_2_apart"))]


@pytest.fixture
def cluster(client) -> str:
    return ray.get_runtime_context().gcs_address


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_publish_what_one_process_would_send(client, cluster, trainer_url, tiny_model, tmp_path, layout):
    version, address = client.status_blocking().weights_version + 1, trainer_url if layout.endswith(HTTP) else cluster
    with ranks_here(tiny_model, layout, (version,), address, timeout_s=300.0) as ranks:
        rows = ranks.publish()
    assert {row["digest"] for row in rows} == {digest_of(tiny_model, 1, tmp_path)}
    status = client.status_blocking()
    assert (status.weights_version, status.weights_digest) == (version, rows[0]["digest"])
    check = client.check_weights_blocking()
    assert not check.unlike and not check.problems
    assert {used for _, used in tokens(client, f"after-{layout}")} == {version}


def test_a_rank_uploads_what_has_changed_since_its_last_version(client, trainer_url, tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="auto")
    version, address = client.status_blocking().weights_version, urlsplit(trainer_url)
    with SlowLink(address.port, mbit=10_000.0) as link, torch.no_grad():
        weights = HttpWeights(f"http://{address.netloc.rpartition('@')[0]}@{link.address}", deltas=True)
        weights.publish_blocking(version + 1, model, 0, 1)
        all_bytes = link.carried
        for parameter in model.parameters():
            parameter.view(-1)[::50] *= CHANGE
        loaded = weights.publish_blocking(version + 2, model, 0, 1)
    assert link.carried - all_bytes < 0.3 * all_bytes
    assert loaded.digest == one_process(model, tmp_path)
    check = client.check_weights_blocking()
    assert not check.unlike and not check.problems
    assert {used for _, used in tokens(client, "after-deltas")} == {version + 2}


@pytest.mark.long
def test_a_killed_rank_costs_its_version_alone(client, cluster, tiny_model):
    version = client.status_blocking().weights_version
    before = tokens(client, "before-kill")
    with ranks_here(tiny_model, "fsdp2_2", (version + 1, version + 2), cluster, timeout_s=10.0) as ranks:
        assert list(map(ranks.line, ranks.processes)) == ["ready"] * 2
        ranks.processes[1].kill()
        ranks.tell(ranks.processes[0])
        row = json.loads(ranks.line(ranks.processes[0]))
    assert row["refused"] == f"weights {version + 1}: rank 1 has not joined within 10 s; the service keeps its weights"
    assert client.status_blocking().weights_version == version and tokens(client, "after-kill") == before
    with ranks_here(tiny_model, "one", (version + 2,), cluster) as ranks:
        assert "digest" in ranks.publish()[0]
