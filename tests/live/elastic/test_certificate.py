"""The certificate on a small workload, with its last run corrupted: all others identical, the corruption found.

Of the ways to roll out these are the ones that one service can take and that other live tests do not compare with plain
decoding (`drafter/test_drafter_live.py` does so with draft models); `tailrace verify` takes them all.
"""

import json
from contextlib import contextmanager

import pytest
import yaml

from tailrace.app.cli import run
from tailrace.app.config import DEFAULT_CONFIG, ServeFile
from tailrace.lab.demo import PROMPTS

SHORT, LONG = ("raced",), ("raced", "scaled_down", "replica_killed")


def without_a_draft_model(file: ServeFile) -> tuple:
    """What decides how replicas come and go, and what they are."""
    return file.application.with_args(drafter=None).args, file.application.of("Engine")


@pytest.mark.parametrize("names", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["short", "long"])
def test_every_run_is_identical_and_a_corruption_is_named(names, client, file, monkeypatch, capsys, tmp_path):
    @contextmanager
    def shared(wanted: ServeFile, address: str | None):
        """The service that is there, which must be the one that the command would start."""
        assert without_a_draft_model(wanted) == without_a_draft_model(file) and address is None
        yield client

    monkeypatch.setattr("tailrace.lab.verification.tokens.service", shared)
    config = yaml.safe_load(DEFAULT_CONFIG.read_text())
    engine = file.application.args.engine
    config["applications"][0]["args"]["engine"] |= {"model": engine.model, "max_model_len": engine.max_model_len}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(PROMPTS.read_text().splitlines()[:4]))
    tokens = "72" if names is SHORT else "160"  # a scale-down on a busy machine takes a while
    what = [
        "--prompts",
        str(prompts),
        "--samples",
        "3",
        "--max-tokens",
        tokens,
        "--only",
        "runs",
        "--corrupt",
        "--json",
    ]
    what += ["--config", str(tmp_path / "serve.yaml")]
    code = run(["verify", *what, *(part for name in names for part in ("--runs", name))])
    said = capsys.readouterr()
    assert code == 1, said.err
    result = json.loads(said.out.splitlines()[-1])
    runs = {run["name"]: run for run in result["runs"]}
    assert list(runs) == ["plain", *names] and result["tokens"] > 500 and not result["identical"]
    *others, (last_name, last) = runs.items()
    assert all(run["identical"] for _, run in others), others
    assert last["first_difference"]["what"] == "token"
    at = last["first_difference"]
    named = f"{last_name} differs: prompt {at['prompt_id']!r} sample {at['sample_index']} position {at['position']}"
    assert named in said.err
    assert runs["plain"]["drafted_tokens"] == runs["plain"]["moved_samples"] == 0
    assert runs["raced"]["races"] > 0 and "actors of the group context" in runs["raced"]["note"]
    if names is SHORT:
        return
    assert runs["scaled_down"]["moved_samples"] > 0
    assert "2 replicas became 1 while" in runs["scaled_down"]["note"]
    assert runs["replica_killed"]["pulled_tokens"] > 0 and "killed replica" in runs["replica_killed"]["note"]
