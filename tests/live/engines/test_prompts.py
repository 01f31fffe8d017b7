"""Prompts against a real tokenizer: what is taken, and what is refused by name."""

import json
import math
import shutil
import subprocess
import sys

import pytest

from tailrace.deployments.batches.model_folder import tokenizer_of
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.constraints.bad_words import word_tokens
from tailrace.deployments.constraints.form_check import FormCheck
from tailrace.deployments.messages.rollout import ChatMessage, PromptGroup, Rejected, checked
from tailrace.deployments.messages.sampling import StructuredOutputs


@pytest.fixture(scope="module")
def prompts(model_dir):
    return Prompts(str(model_dir), max_model_len=64)


def group(**what) -> PromptGroup:
    return PromptGroup(prompt_id="p", samples=1, **what)


def test_text_tokens_and_chat_are_taken(prompts):
    text = prompts.prepare_group(group(text="Hello there"))
    assert prompts.decode(text.token_ids) == "Hello there"
    assert prompts.prepare_group(group(token_ids=text.token_ids)).token_ids == text.token_ids
    chat = prompts.prepare_group(group(messages=[ChatMessage(role="user", content="Hello there")]))
    assert set(text.token_ids) < set(chat.token_ids)


def test_max_tokens_is_cut_to_what_the_context_leaves(prompts):
    assert prompts.prepare_group(group(token_ids=(5,) * 60, max_tokens=100)).max_tokens == 4
    assert prompts.prepare_group(group(token_ids=(5,) * 60, max_tokens=3)).max_tokens == 3


@pytest.mark.parametrize(
    "what, said",
    [
        (
            {"token_ids": (5,) * 64},
            "this model's maximum context length is 64 tokens, and the prompt has 64",
        ),
        ({"token_ids": (5, 49_152)}, "token_ids: 49152 is not in the vocabulary"),
        ({"token_ids": (-1,)}, "token_ids: -1 is not in the vocabulary"),
        ({"text": "x", "forced_token_ids": ((5, 60_000),)}, "forced_token_ids: 60000 is not in the vocabulary"),
    ],
)
def test_what_the_model_cannot_take_is_refused_by_name(prompts, what, said):
    refused = prompts.prepare_group(group(**what))
    assert isinstance(refused, Rejected) and said in refused.reason


def refusal(prompts, **what) -> str | None:
    """Of a request as it comes, by the messages or by the model's own way."""
    made = checked(PromptGroup, {"prompt_id": "p", "samples": 1, "text": "x"} | what)
    found = made if isinstance(made, Rejected) else prompts.prepare_group(made)
    return found.reason if isinstance(found, Rejected) else None


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": (math.inf, -math.inf, math.nan, 1e39, -1.0),
        "top_p": (0.0, -0.0, 1.1, math.nan, math.inf),
        "top_k": (-2, -(2**31), 0.5),
        "min_p": (-0.1, 1.1, math.nan),
        "repetition_penalty": (0.0, -1.0, 1e-40, math.inf, math.nan),
        "presence_penalty": (2.1, -math.inf, math.nan),
        "frequency_penalty": (-2.1, math.nan),
        "min_tokens": (-1, 2**31, 10**40),
        "stop_token_ids": ((-1,), (49_152,), (2**31,), (10**40,)),
        "allowed_token_ids": ((), (-1,), (49_152,), (2**63,)),
        "logit_bias": ({-1: 1.0}, {49_152: 1.0}, {5: math.nan}, {5: math.inf}, {5: 101.0}),
        "stop": (("",), ("a\ud83d",), ("x" * 300,)),
        "bad_words": (("",), ("\udc00",), tuple(f"x{number}" for number in range(200))),
        "top_logprobs": (-1, 10**9),
        "prompt_logprobs": (-1, 10**9),
    }.items(),
)
def test_each_value_that_no_engine_can_hold_is_refused_by_its_field(prompts, field, values):
    for value in values:
        reason = refusal(prompts, sampling={field: value})
        assert reason is not None and field in reason and "\n" not in reason, f"{value!r}: {reason}"


@pytest.mark.parametrize("top_k", [-1, 0, 49_151, 49_152, 2**31 - 1, 2**31, 2**63, 10**40])
def test_a_top_k_beyond_the_vocabulary_is_no_filter(prompts, top_k):
    assert refusal(prompts, sampling={"top_k": top_k}) is None


@pytest.mark.parametrize(
    "what",
    [
        {"text": "a\ud83d b"},
        {"text": None, "messages": [{"role": "user", "content": "\udc00"}]},
        {"text": None, "messages": [{"role": "us\ud83der", "content": "x"}]},
        {"prompt_id": "\ud83d"},
        {"adapter": "\ud83d"},
        {"sampling": {"structured_outputs": {"choice": ["\ud83d"]}}},
        {"sampling": {"structured_outputs": {"regex": "\ud83d"}}},
        {"sampling": {"structured_outputs": {"json": '{"type": "\ud83d"}'}}},
    ],
)
def test_a_text_that_is_no_unicode_is_refused(prompts, what):
    assert "half of a surrogate pair" in refusal(prompts, **what)


def test_rules_that_leave_no_token_are_refused(prompts):
    (the,) = prompts.encode(" the")
    assert "no token is left" in refusal(prompts, sampling={"allowed_token_ids": (the,), "bad_words": ["the"]})
    assert "no token is left" in refusal(prompts, sampling={"allowed_token_ids": (2,), "min_tokens": 1})
    ends = {"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 2}
    assert "no token is left" in refusal(prompts, sampling=ends)
    assert refusal(prompts, sampling=ends | {"min_tokens": 0}) is None
    assert refusal(prompts, sampling={"allowed_token_ids": (the, 5), "bad_words": ["the"]}) is None


def test_bad_words_have_the_tokens_that_vllm_gives_them(prompts, model_dir):
    from vllm import SamplingParams
    from vllm.tokenizers import get_tokenizer

    words = ["the", " the", "of the", "Zürich", ",", "😀", "x y z"]
    params = SamplingParams(bad_words=words)
    params.update_from_tokenizer(get_tokenizer(str(model_dir)))
    assert word_tokens(words, prompts.encode) == params.bad_words_token_ids


def test_forms_are_tried_in_a_process_with_limits(model_dir):
    """One that compiles for too long ends that process alone, and the next one is checked as if nothing had been."""
    check = FormCheck(str(model_dir), compile_s=2.0)
    try:
        assert check.refusal(StructuredOutputs(regex="[a-f]{3}"), (2,)) is None
        for form in ({"regex": r"[^\s\S]"}, {"grammar": 'root ::= root "a"'}):
            assert "allows no answer" in check.refusal(StructuredOutputs(**form), (2,))
        assert "too long or too much" in check.refusal(StructuredOutputs(choice=("x" * 2_000_000,)), (2,))
        deep = '{"properties": {"a": ' * 3_000 + "{}" + "}}" * 3_000
        assert "\n" not in check.refusal(StructuredOutputs(json=deep), (2,))
        assert check.refusal(StructuredOutputs(json={"type": "object"}), (2,)) is None
    finally:
        check.close()


WITHOUT_TORCH = """
import sys
from pathlib import Path
from tailrace.deployments.batches.model_folder import tokenizer_of
chat = [{"role": "user", "content": "Hello there"}]
print(tokenizer_of(Path(sys.argv[1])).apply_chat_template(chat)["input_ids"], "torch" in sys.modules)
"""


def test_a_tokenizer_that_is_one_file_is_autotokenizers_without_torch(model_dir):
    from transformers import AutoTokenizer

    ours, theirs = tokenizer_of(model_dir), AutoTokenizer.from_pretrained(model_dir)
    assert type(ours) is type(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    command = (sys.executable, "-c", WITHOUT_TORCH, str(model_dir))
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    chat = [{"role": "user", "content": "Hello there"}]
    assert said.strip() == f"{theirs.apply_chat_template(chat)['input_ids']} False"


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"model_type": "qwen2"}),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ],
)
def test_other_tokenizers_are_autotokenizers_choice(model_dir, tmp_path, file, changes):
    from transformers import AutoTokenizer

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, tmp_path)
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | changes))
    assert type(tokenizer_of(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))
