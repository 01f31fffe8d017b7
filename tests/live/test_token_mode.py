"""A service does not start on a Ray without token mode: one line, and nothing is left."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMPT = '{"prompt_id": "a", "text": "One, two,"}\n'


def test_a_command_refuses_where_the_token_mode_is_off(tiny_model, tmp_path):
    (tmp_path / "p.jsonl").write_text(PROMPT)
    (tmp_path / "serve.yaml").write_text(
        yaml.safe_dump({"applications": [{"name": "tailrace", "args": {"engine": {"model": str(tiny_model)}}}]})
    )
    arguments = ("-m", "tailrace", "rollout", "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl")
    done = subprocess.run(
        (sys.executable, *map(str, arguments), "--config", str(tmp_path / "serve.yaml")),
        cwd=ROOT, env=os.environ | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: Ray's token mode is off") and "args.allow_no_token: true" in last
    assert not (tmp_path / "o.jsonl").exists() or not (tmp_path / "o.jsonl").read_text()
