"""prime-rl's data plane, `renderers.client.generate`, in its own environment (`make test-renderers`)."""

import json
import subprocess
from pathlib import Path

import pytest
from gateway_service import TOKENS

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.renderers
def test_rendered_messages_have_the_tokens_and_logprobs_of_a_batch(address, tiny_model):
    url, client = address
    command = [ROOT / ".venv-renderers/bin/python", ROOT / "integrations/renderers/roll.py"]
    done = subprocess.run(
        [*map(str, command), url, TOKENS["evaluator"], str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    group = PromptGroup(prompt_id="sky", token_ids=found[0]["prompt_ids"], samples=3, max_tokens=12)
    (expected,) = client.rollout_blocking(RolloutBatch(batch_id="sky", groups=(group,)))
    assert [tuple(one["completion_ids"]) for one in found] == [sample.token_ids for sample in expected.samples]
    for one, sample in zip(found, expected.samples, strict=True):
        assert one["completion_logprobs"] == pytest.approx(sample.logprobs, abs=1e-4)
