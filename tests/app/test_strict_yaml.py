"""YAML is read as people mean it, or a line says where it is not."""

import pytest
import yaml
from test_imports import ROOT

from tailrace.app.config import load_config
from tailrace.app.errors import BadInput
from tailrace.app.strict_yaml import read_yaml
from tailrace.app.train.train_config import read_train_config
from tailrace.deployments.declared_fields import as_one_of, declared_fields, kinds_of
from tailrace.deployments.vllm_exact.engine_config import ASYNC, ENGINE_ARGS, OURS, SPECULATION, EngineConfig
from tailrace.deployments.vllm_exact.launch import engine_arguments
from tailrace.policies.families.registry import load_policy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("2.", 2.0),
        (".5", 0.5),
        ("-1_000", -1000),
        ("0o17", 15),
        ("0x1f", 31),
        ("12:30", "12:30"),
        ("1:2:3", "1:2:3"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("1e", "1e"),
        ("'010'", "010"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_a_plain_word_is_what_it_looks_like(tmp_path, text, value):
    path = tmp_path / "x.yaml"
    path.write_text(f"a: {text}")
    found = read_yaml(path)["a"]
    assert found == value and type(found) is type(value)
    again = yaml.safe_load(yaml.safe_dump({"a": found}))["a"]
    assert again == value, "Serve, which reads YAML 1.1, takes it for the same"


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 010", "line 1: 010: some readers take it as octal; write 10"),
        ("a: .inf", "line 1: .inf: give a finite number"),
        ("a: 1\nb: 1e400", "line 2: 1e400: give a finite"),
        ("a: " + "9" * 5000, "line 1: 9+...: a number of 5000 digits"),
        ("a: &x [*x]", "line 1: an alias names the very thing"),
        (BOMB, "its aliases refer to one another"),
        ("a: 1\na: 2", "line 2: a: the key is there twice"),
        ("null: 1", "line 1: null: no name of a key"),
        ("true: 1", "line 1: true: no name of a key"),
        ("? [a]\n: 1", "line 1: not YAML: found unhashable key"),
        ("a: !!timestamp x", "could not determine a constructor"),
        ("a: !!python/name:os x", "could not determine"),
        ("a: !!int x", "line 1: x: no integer"),
        ("a: !!bool x", "line 1: x: give true or false"),
        ('a: ["\\ud83d"]', "a.0: half of a surrogate pair"),
        ("a: \0", "not YAML: unacceptable character"),
        ("---\na\n---\nb", "line 3: not YAML: but found another document"),
        ("[" * 5000, "nested too deeply"),
        ("\ta: 1", "line 1: not YAML"),
        ("a: " + "x" * 2**20, "is the limit"),
    ],
)
def test_what_is_meant_by_no_one_is_named(tmp_path, text, said):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_yaml(path)


def test_other_encodings(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_yaml(path) == {"a": 1, "b": 2}
    path.write_text("a: 1", encoding="utf-16")
    with pytest.raises(ValueError, match="not UTF-8 at byte 1: it looks like UTF-16"):
        read_yaml(path)


def test_every_file_of_the_project_reads_the_same_by_either_version():
    found = [
        path
        for folder in (".", "lab/simulator/scenarios", "examples", "monitoring")
        for path in (ROOT / folder).glob("*.y*ml")
    ]
    assert len(found) > 12
    for path in found:
        assert read_yaml(path) == yaml.safe_load(path.read_text()), path


def engine(tmp_path, text: str) -> EngineConfig:
    path = tmp_path / "serve.yaml"
    path.write_text("applications:\n- args:\n    engine: {model: demo, " + text + "}\n")
    return load_config(path).application.args.engine


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("draft: {method: off}", "draft.method", "off"),
        ("draft: {method: False}", "draft.method", "off"),
        ("redraw_close_calls: yes", "redraw_close_calls", True),
        ("kv_cache_gib: 1e-3", "kv_cache_gib", 1e-3),
        (
            "vllm_args: {enable_lora: on, max_loras: 2.0, gpu_memory_utilization: 9e-1}",
            "vllm_args",
            {"enable_lora": True, "max_loras": 2, "gpu_memory_utilization": 0.9},
        ),
        ("vllm_args: {weight_transfer_config: {backend: nccl}}", "weight_transfer", "nccl"),
    ],
)
def test_settings_of_an_engine_are_taken_as_meant(tmp_path, text, key, value):
    found = engine(tmp_path, text)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_num_seq: 4", "max_num_seq: vLLM's EngineArgs has no such field; did you mean max_num_seqs?"),
        ("max_num_seqs: 4", "max_num_seqs: the engine sets it itself; set max_running instead"),
        ("seed: 1", "seed: the engine"),
        ("enforce_eager: true", "enforce_eager: the engine sets it itself"),
        ("pipeline_parallel_size: 2", "pipeline_parallel_size: an engine has one stage; remove it"),
        ("max-loras: 1", "max-loras: .*did you mean max_loras?"),
        ("enable_lora: perhaps", "enable_lora: bool is needed, not 'perhaps'"),
        ("max_loras: [1]", "max_loras: int is needed"),
        ("tokenizer: 5", "tokenizer: null or str is needed, not 5; quote it"),
        ("zzz: 1", "zzz: .*no such field; remove it"),
    ],
)
def test_a_key_of_vllm_is_checked_before_anything_starts(tmp_path, text, said):
    path = tmp_path / "serve.yaml"
    path.write_text("applications:\n- args:\n    engine: {model: demo, vllm_args: {" + text + "}}\n")
    with pytest.raises(BadInput, match=rf"serve.yaml: applications.0.args.engine.vllm_args.{said}"):
        load_config(path)


def test_the_engines_own_arguments_are_those_that_are_refused():
    given = engine_arguments(EngineConfig(model="m", device="gpu", kv_cache_gib=None)).keys()
    assert given == OURS.keys() | {ASYNC, SPECULATION}, "these two a file may have"
    assert set(OURS) <= declared_fields(ENGINE_ARGS).keys()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{betta: 1}", "trl.betta: trl.GRPOConfig has no such field; did you mean beta"),
        ("{beta: x}", "trl.beta: float is"),
        ("{temperature: 1}", "trl.temperature: the run sets it itself"),
        ("{logging_strategy: 'no'}", "trl.logging_strategy: the run sets it itself"),
        ("{repetition_penalty: 1.2}", "trl.repetition_penalty: the run sets it itself"),
        ("{num_iterations: 2}", "trl.num_iterations: 2: a step"),
        ("{max_grad_norm: 1:30}", "trl.max_grad_norm: float is needed"),
        ("x", "trl: Input should be a valid dict"),
    ],
)
def test_a_key_of_trl_is_checked_before_anything_starts(tmp_path, text, said):
    path = tmp_path / "train.yaml"
    path.write_text(f"task: {{name: chain_sum}}\ntrl: {text}\n")
    with pytest.raises(BadInput, match=rf"train.yaml: {said}"):
        read_train_config(path)


def test_numbers_and_truth_values_of_trl_are_taken_as_meant(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("task: {name: chain_sum}\ntrl: {beta: 1e-3, max_grad_norm: '5e-1', bf16: off, report_to: none}\n")
    assert read_train_config(path).trl == {"beta": 0.001, "max_grad_norm": 0.5, "bf16": False, "report_to": "none"}
    path.write_text("task: {name: chain_sum}\ntrl: {loss_type: grpo}\ntrainer: {samples_per_pass: 1}\n")
    with pytest.raises(BadInput, match=r"trainer.samples_per_pass: trl.loss_type grpo"):
        read_train_config(path)


def test_kinds_of_values():
    assert kinds_of("Optional[float]") == kinds_of("float | None") == {"float", "None"}
    assert as_one_of({"int", "None"}, None) is None
    assert as_one_of({"str", "bool"}, "no") is False and as_one_of({"str"}, "no") == "no"
    assert as_one_of({"int"}, "12") == 12 and as_one_of({"float"}, 3) == 3
    for kinds, value in (({"int"}, 1.5), ({"int"}, None), ({"float"}, True), ({"str"}, 1), ({"bool"}, 1)):
        with pytest.raises(ValueError, match="is needed, not"):
            as_one_of(kinds, value)


def test_a_policy_that_is_off_is_taken_from_either_version():
    for given in ("off", False, {"type": False}):
        assert load_policy("racing", given).type == "off"
