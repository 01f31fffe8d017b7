"""Every parser takes a mutated input rightly or refuses it in one line: no other exception leaves it."""

import gzip
import json
import warnings
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml
from msgspec import msgpack
from parser_mutations import json_lines, mutated_bytes, mutated_value

from tailrace.app.config import DEFAULT_CONFIG, ELASTIC_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.app.files.dumps import read_dump
from tailrace.app.files.prompts import read_prompts
from tailrace.app.files.results import ResultsFile
from tailrace.app.files.traces import read_trace, replay_groups
from tailrace.deployments.coordinator.journal import read_journal
from tailrace.deployments.drafter.wire import decode
from tailrace.deployments.vllm_exact.weight_loading import checked_digest
from tailrace.lab.commands import compare
from tailrace.lab.fuzz.outcomes_file import OutcomesFile
from tailrace.lab.simulator.scenario import FOLDER, load_scenario
from tailrace.lab.timeline.record import record

SEEDS = 60
"""Of each parser; `--long` tries 75 times as many."""

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop_token_ids": [2, 3], "stop": ["a"]}
SAMPLING |= {"logit_bias": {"5": 1.0}, "bad_words": ["b"], "structured_outputs": {"choice": ["c", "d"]}}
PROMPTS = [
    {"prompt_id": "a", "text": "hello", "samples": 2, "max_tokens": 8, "sampling": SAMPLING},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"token_ids": [1, 2, 3], "seed": 4},
]
SEGMENT = {"weights_version": 1, "weights_digest": "ab", "replica_id": "r", "start": 0, "end": 2}
SAMPLE = {
    "sample_index": 0, "token_ids": [1, 2], "finish_reason": "stop", "segments": [SEGMENT], "logprobs": [-1.0, -2.0],
}  # fmt: skip
RESULTS = [
    {"prompt_id": name, "request": "0123", "prompt_token_ids": [1, 2], "samples": [SAMPLE, SAMPLE]} for name in "ab"
]
OUTCOME = {"problem": None, "faults": {"kill": 2}, "samples": 8, "tokens": 99, "virtual_s": 31.5}
OUTCOMES = [{"code": "c", "kinds": ["kill"]}, *({"seed": seed, **OUTCOME} for seed in range(3))]
TRACE_SAMPLE = {"text": "an answer", "reward": 1.0}
TRACE = [
    {"prompt_id": n, "prompt": "p", "epochs": [{"policy_step": 1, "samples": [TRACE_SAMPLE] * 2}]} for n in range(2)
]
DUMPS = [
    {"input": "p", "output": "o", "score": 1.0, "step": 3},
    {"prompt": "p", "completion": "c", "step": 1, "reward": 0.5},
    {"prompt": ["p", "q"], "completion": ["c", "d"], "step": [1, 1], "reward": [0.5, None]},
    *RESULTS,
    *TRACE,
]
SIMULATED = {
    "workload": "w", "scale": 1.0,
    "systems": {"verl": [{"seed": 0, "makespan_s": 1.0, "tail_s": 0.5, "tokens": 10}]},
}  # fmt: skip
JOURNAL = gzip.decompress((Path(__file__).parents[1] / "data" / "journal.jsonl.gz").read_bytes()).splitlines()[:40]
OPEN = ["Open", "s", 1, 0.7, 1.0, 0, 0.0, [3], 8, 40, 4, True, [0, bytes(12)]]
FRAME = [OPEN, ["Confirm", "s", 2, [4]], ["Stop", "s"], ["Guess", "s", 3, [1, 2], 4, 2]]


@cache
def loaded(path: Path) -> object:
    return yaml.safe_load(path.read_text())


def yaml_of(path: Path, rng: Random) -> bytes:
    if rng.random() < 0.4:
        return mutated_bytes(path.read_bytes(), rng)
    value = mutated_value(loaded(path), rng)
    return json.dumps(value).encode("utf-8", "surrogatepass")  # JSON is YAML, and keeps strange values


def report(rng: Random) -> bytes:
    whole = json.dumps(SIMULATED).encode()
    return mutated_bytes(whole, rng) if rng.random() < 0.5 else json.dumps(mutated_value(SIMULATED, rng)).encode()


def journal(rng: Random) -> bytes:
    return json_lines(list(map(json.loads, JOURNAL)), rng)


def frame(rng: Random) -> bytes:
    try:
        whole = msgpack.encode(mutated_value(FRAME, rng))
    except (OverflowError, UnicodeEncodeError):
        whole = msgpack.encode(FRAME)
    return mutated_bytes(whole, rng) if rng.random() < 0.7 else whole


def tensors(rng: Random) -> bytes:
    """A safetensors file: eight bytes of length, a header of JSON, the numbers."""
    header = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(header if rng.random() < 0.5 else mutated_value(header, rng)).encode()
    whole = len(text).to_bytes(8, "little") + text + np.ones(4, np.float32).tobytes()
    return whole if rng.random() < 0.3 else mutated_bytes(whole, rng)


def read_weights(path: Path) -> None:
    path.rename(path.parent / "model.safetensors")
    checked_digest(str(path.parent))


def lines_of(path: Path) -> list[str]:
    return path.read_bytes().decode().splitlines()


PARSERS = {
    "prompts": (".jsonl", lambda rng: json_lines(PROMPTS, rng), lambda path: read_prompts(path, {"samples": 2})),
    "out": (".jsonl", lambda rng: json_lines(RESULTS, rng), lambda path: ResultsFile(path).close()),
    "fuzz_out": (
        ".jsonl", lambda rng: json_lines(OUTCOMES, rng), lambda path: OutcomesFile(path, "c", ["kill"]).close(),
    ),
    "trace": (
        ".jsonl", lambda rng: json_lines(TRACE, rng),
        lambda path: replay_groups(
            read_trace(path), lambda text: [len(text)], prompts=9, samples=9, max_tokens=9
        ),
    ),
    "trace_gz": (".gz", lambda rng: mutated_bytes(gzip.compress(json.dumps(TRACE[0]).encode()), rng), read_trace),
    "dump": (".jsonl", lambda rng: json_lines(DUMPS, rng), lambda path: list(read_dump(path, lambda n: None))),
    "dump_gz": (
        ".gz", lambda rng: mutated_bytes(gzip.compress(json.dumps(DUMPS[0]).encode()), rng),
        lambda path: list(read_dump(path, lambda n: None)),
    ),
    "config": (".yaml", lambda rng: yaml_of(rng.choice((DEFAULT_CONFIG, ELASTIC_CONFIG)), rng), load_config),
    "scenario": (
        ".yaml", lambda rng: yaml_of(rng.choice(sorted(FOLDER.glob("*.yaml"))), rng),
        lambda path: load_scenario(str(path)),
    ),
    "report": (".json", report, compare.read),
    "journal": (".jsonl", journal, lambda path: read_journal(lines_of(path))),
    "timeline": (".jsonl", journal, lambda path: record(lines_of(path))),
    "wire": (".bin", frame, lambda path: decode(path.read_bytes())),
    "weights": (".bin", tensors, read_weights),
}  # fmt: skip
"""By name: the suffix of a file, its mutated bytes, and its parser."""


def escapes(name: str, seeds: range, folder: Path) -> tuple[list[str], int]:
    """Exceptions that are no refusal in one line, and the number of inputs that were refused."""
    suffix, make, read = PARSERS[name]
    found, refused = [], 0
    for seed in seeds:
        path = folder / f"{name}-{seed}" / f"input{suffix}"
        path.parent.mkdir()
        path.write_bytes(make(Random(f"{name} {seed}")))
        try:
            read(path)
        except (BadInput, ValueError) as error:
            refused += 1
            said = error.message if isinstance(error, BadInput) else str(error)
            if not said or len(said.splitlines()) != 1 or type(error) not in (BadInput, ValueError, UnicodeDecodeError):
                found.append(f"seed {seed}: {type(error).__name__}: {said[:200]!r}")
        except Exception as error:  # noqa: BLE001 - the fault that this test is about
            found.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]!r}")
    return found, refused


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_no_mutation_escapes(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, refused = escapes(name, range(SEEDS), tmp_path)
    assert found == []
    assert refused > SEEDS // 10, "the mutations change too little"


@pytest.mark.long
@pytest.mark.parametrize("name", PARSERS)
def test_no_mutation_escapes_at_length(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert escapes(name, range(SEEDS, 76 * SEEDS), tmp_path)[0] == []
