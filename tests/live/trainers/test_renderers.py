"""prime-rl's data plane in an environment of its own (`make test-renderers`): `renderers.client.generate`, and
verifiers, which plays a game of two turns by its own command, `vf-eval`."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from gateway_service import TOKENS

from tailrace.app.calls.session import prompt_name
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

ROOT = Path(__file__).resolve().parents[3]
FOLDER, PROGRAMS = ROOT / "integrations/renderers", ROOT / ".venv-renderers/bin"


def said_by(*command: object, **environment: str) -> str:
    """What the program prints. `environment`: more of it."""
    done = subprocess.run(
        [*map(str, command)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.renderers
def test_rendered_messages_have_the_tokens_and_logprobs_of_a_batch(address, tiny_model):
    url, client = address
    lines = said_by(PROGRAMS / "python", FOLDER / "roll.py", url, TOKENS["evaluator"], tiny_model).splitlines()
    found = [json.loads(line) for line in lines]
    group = PromptGroup(prompt_id="sky", token_ids=found[0]["prompt_ids"], samples=3, max_tokens=12)
    (expected,) = client.rollout_blocking(RolloutBatch(batch_id="sky", groups=(group,)))
    assert [tuple(one["completion_ids"]) for one in found] == [sample.token_ids for sample in expected.samples]
    for one, sample in zip(found, expected.samples, strict=True):
        assert one["completion_logprobs"] == pytest.approx(sample.logprobs, abs=1e-4)


def turns_of(trace: dict) -> list[tuple[tuple, tuple, list]]:
    """Of each answer: the tokens before it, its tokens, and their logprobs."""
    found, before = [], []
    for node in trace["nodes"]:
        sampled = [token for token, mine in zip(node["token_ids"], node["mask"], strict=True) if mine]
        if node["sampled"]:
            scaffold = node["token_ids"][: len(node["token_ids"]) - len(sampled)]
            found.append(((*before, *scaffold), tuple(sampled), node["logprobs"]))
        before += node["token_ids"]
    return found


@pytest.mark.renderers
def test_turns_of_verifiers_have_the_tokens_and_logprobs_of_a_batch(address, tiny_model, tmp_path):
    url, client = address
    options = {"model": tiny_model.name, "client.base-url": f"{url}/v1", "client.renderer-model-name": tiny_model}
    options |= {"output-dir": tmp_path, "run.dir": "run"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(FOLDER), "TAILRACE_TOKEN": TOKENS["evaluator"]}
    said_by(PROGRAMS / "vf-eval", "@", FOLDER / "doubling.toml", *words, "--no-rich", **variables)
    episodes = [json.loads(line) for line in (tmp_path / "run/traces.jsonl").read_text().splitlines()]
    traces = [trace for episode in episodes for trace in episode["traces"]]
    assert len(traces) == 3 and all(trace["ok"] for trace in traces)
    turns = [turn for trace in traces for turn in turns_of(trace)]
    assert len(turns) == 6 and len({prompt for prompt, *_ in turns}) == 6
    groups = [
        PromptGroup(prompt_id=prompt_name({"token_ids": prompt}), token_ids=prompt, samples=2, max_tokens=12)
        for prompt, *_ in turns
    ]
    results = client.rollout_blocking(RolloutBatch(batch_id="verifiers", groups=groups, seed=9))
    expected = {group.prompt_token_ids: group.samples[1] for group in results}  # the seed of doubling.toml
    for prompt, tokens, logprobs in turns:
        assert tokens == expected[prompt].token_ids
        assert logprobs == pytest.approx(expected[prompt].logprobs, abs=1e-3)  # traces have four digits
