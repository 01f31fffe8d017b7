"""Unmodified harnesses of agents against a gateway with real engines (`make test-harnesses`).

Each gets an address and a key alone. The tiny model answers nonsense, so the trajectory constrains its answers to calls
of the harness's own tool, which the harness runs; it ends by its own limit of turns, or by the trajectory's. Of each
row, tokens and logprobs are those that engines sample after the same tokens, asked once more by token ids.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from gateway_service import TOKENS, gateway

from tailrace.deployments.batches.prompts import Prompts
from tailrace.http import Client

ROOT = Path(__file__).resolve().parents[3]
FOLDER, PROGRAMS = ROOT / "integrations/harnesses", ROOT / ".venv-harnesses/bin"
NODE = FOLDER / "node_modules/.bin"
CONTEXT = 32_768
TURNS = 3


class Run(NamedTuple):
    """A harness's command, the form of the only call that its model makes, and what its tool says. `first`: what it
    asks for on the side, such as a title."""

    command: list
    call: str
    says: str
    aside: int = 0


def called(name: str, arguments: str) -> str:
    return rf'<tool_call>\n\{{"name": "{name}", "arguments": \{{{arguments}\}}\}}\n</tool_call>'


LOOK = called("look", '"place": "[a-z]{1,9}"')
CODEX = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
RUNS = {
    "mini-swe-agent": Run(
        [PROGRAMS / "mini", "-m", "openai/any", "-t", "Say it.", "--yolo", "--exit-immediately", "-l", "0",
         "-c", "mini.yaml", "-c", f"agent.step_limit={TURNS}"],
        called("bash", '"command": "echo [a-z]{1,9}"'), '"returncode": 0',
    ),
    "openai-agents": Run([PROGRAMS / "python", FOLDER / "agent_of_openai.py"], LOOK, "is quiet."),
    "openai-agents-streamed": Run([PROGRAMS / "python", FOLDER / "agent_of_openai.py", "--stream"], LOOK, "is quiet."),
    "anthropic": Run([PROGRAMS / "python", FOLDER / "agent_of_anthropic.py"], LOOK, "is quiet."),
    "anthropic-streamed": Run([PROGRAMS / "python", FOLDER / "agent_of_anthropic.py", "--stream"], LOOK, "is quiet."),
    "codex": Run([NODE / "codex", *CODEX, "Say it."], called("exec_command", '"cmd": "echo [a-z]{1,9}"'), "exited"),
    "opencode": Run(
        [NODE / "opencode", "run", "Say it."],
        called("bash", '"command": "echo [a-z]{1,9}", "description": "Says [a-z]{1,9}"'), "", aside=1,
    ),
}  # fmt: skip
CODEX_CONFIG = """model = "any"
model_provider = "tailrace"
[model_providers.tailrace]
name = "Tailrace"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
QUIET = {
    "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}  # fmt: skip
"""What keeps harnesses from asking questions, or the network."""


@pytest.fixture(scope="module")
def long_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with room for harnesses' prompts."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="module")
def address(long_model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(long_model, folder, max_model_len=CONTEXT, max_body_bytes=2_000_000) as (url, _):
        yield url


@pytest.fixture
def tailrace(address):
    client = Client(address, TOKENS["evaluator"])
    yield client
    client.close()


def played(run: Run, trajectory, folder: Path) -> str:
    """Runs the harness to its end. Returns what it printed."""
    (folder / ".codex").mkdir()
    (folder / ".codex/config.toml").write_text(CODEX_CONFIG.format(base_url=trajectory.base_url))
    given = {f"{vendor}_{name}": value for vendor in ("OPENAI", "ANTHROPIC")
             for name, value in (("BASE_URL", trajectory.base_url), ("API_KEY", trajectory.api_key))}  # fmt: skip
    done = subprocess.run(
        [*map(str, run.command)],
        env=os.environ | QUIET | given | {"HOME": str(folder)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.harnesses
@pytest.mark.parametrize("name", RUNS)
def test_a_harness_s_rows_have_what_engines_sampled(tailrace, long_model, tmp_path, name):
    run = RUNS[name]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "structured_outputs": {"regex": run.call}}
    names = {"group": name, "seed": 3, "sampling": sampling}
    trajectory = tailrace.trajectory_blocking(limits={"turns": TURNS + run.aside}, **names)
    said = played(run, trajectory, tmp_path)
    found = trajectory.reward_blocking(1.0)
    assert found.turns == TURNS + run.aside and found.branches == run.aside and not found.reencoded_tokens, said
    assert sum(sum(row.mask) for row in found.rows) == found.sampled_tokens
    row = max(found.rows, key=lambda row: len(row.turns))
    assert len(row.turns) == TURNS
    prompts = Prompts(str(long_model), CONTEXT)
    for before, after in zip(row.turns, row.turns[1:], strict=False):
        between = prompts.decode(list(row.token_ids[before.end : after.start]), special=True)
        assert run.says in between
    again = tailrace.trajectory_blocking(**names)
    for number, place in enumerate(row.turns):
        check_sampled(again, row, number, place)
    again.close_blocking()


def check_sampled(again, row, number: int, place) -> None:
    """Asks for the same turn of a trajectory of the same names by the tokens before it."""
    prompt, expected = list(row.token_ids[: place.start]), list(row.token_ids[place.start : place.end])
    asked = {"prompt": prompt, "max_tokens": len(expected), "logprobs": 1, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {again.api_key}"}
    answer = httpx.post(f"{again.base_url}/completions", json=asked, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == expected, f"turn {number}"
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(row.logprobs[place.start : place.end], abs=1e-4)
