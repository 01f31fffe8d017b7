"""Requests' rules for tokens on an engine with drafts: kept, by vLLM's formulas, and independent of chunks."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_answers import run
from looked_up import drafted, looked_up
from transformers import AutoTokenizer

from tailrace.deployments.constraints.form_check import form_refusal
from tailrace.deployments.constraints.logit_rules import LogitRules, rule_args
from tailrace.deployments.constraints.stop_texts import cut, first_end
from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.sampling import SamplingParams, StructuredOutputs
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.policies.protocol.events import ChunkEnd

pytestmark = pytest.mark.live

TOKENS, EOS = 40, 2
WORDS = np.array([504, 2365, 355, 260, 4052, 314, 253, 1568, 282, 260, 1004, 28], np.int32)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FEW = (504, 2365, 355, 260)
ASKED = {
    "plain": {},
    "repetition": {"repetition_penalty": 100.0},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.7},
    "bias": {"logit_bias": {260: 4.0, 28: -100.0}},
    "bad_words": {"bad_words": [",", "of the"]},
    "allowed": {"allowed_token_ids": FEW},
    "min_tokens": {"min_tokens": 20, "logit_bias": {EOS: 100.0}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {EOS: 12.0}},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "regex": {"structured_outputs": {"regex": r"[a-f]{3}-[0-9]{4}"}, "temperature": 0.8, "top_p": 0.9},
    "choice": {"structured_outputs": {"choice": ["a heron", "a hound"]}},
    "stop": {"stop": [" the", ","]},
    "tops": {"top_logprobs": 3, "top_p": 0.9},
    "mask": {"sampling_mask": True, "top_k": 20, "top_p": 0.95, "bad_words": [","]},
}


def chunk(name: str, done=(), max_tokens=TOKENS, **changes) -> ChunkRequest:
    start = np.tile(WORDS, 2)
    values = {
        "chunk_id": f"{name}/{len(done)}",
        "sample_key": sample_key(3, 0, "rules", 0),
        "token_ids": np.concatenate([start, np.asarray(done, np.int32)]),
        "prompt_tokens": len(start),
        "max_tokens": max_tokens,
        "sampling": SamplingParams(**ASKED[name]),
        "weights_version": 0,
        "draft": drafted(4),
    }
    return ChunkRequest(**values | changes)


@pytest.fixture(scope="module")
def engine(model_dir):
    config = EngineConfig(model=str(model_dir), max_model_len=256, kv_cache_gib=0.1, **looked_up(4))
    engine = EngineRunner(config, "ruled")
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def words(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def answers(engine):
    """All at once, so that ruled and plain rows share steps."""
    results = run(engine, *(chunk(name) for name in ASKED))
    for name, result in zip(ASKED, results, strict=True):
        assert not isinstance(result, Exception), f"{name}: {result}"
    return dict(zip(ASKED, results, strict=True))


@pytest.fixture(scope="module")
def pieces(engine):
    """Every answer in chunks of 7; the next ones of all names run at once."""
    found = {name: [] for name in ASKED}
    going = {name: [] for name in ASKED}  # its tokens so far
    while going:
        asked = [chunk(name, done, min(7, TOKENS - len(done))) for name, done in going.items()]
        for name, part in zip(list(going), run(engine, *asked), strict=True):
            found[name].append(part)
            going[name] += part.token_ids.tolist()
            if part.end is ChunkEnd.STOP or len(going[name]) == TOKENS:
                del going[name]
    return found


@pytest.mark.parametrize("name", ASKED)
def test_chunks_of_7_have_the_tokens_of_the_whole_answer(answers, pieces, name):
    whole, parts = answers[name], pieces[name]
    for kind in ("token_ids", "logprobs", "raw_logprobs"):
        joined = np.concatenate([getattr(part, kind) for part in parts])
        np.testing.assert_allclose(joined, getattr(whole, kind), atol=0 if kind == "token_ids" else 1e-3)
    assert parts[-1].end is whole.end
    tops = [one for part in parts for one in part.top_logprobs]
    masks = tuple(one for part in parts for one in part.sampling_mask)
    assert [one[0][0] for one in tops] == [one[0][0] for one in whole.top_logprobs]
    assert masks == whole.sampling_mask


def test_masks_hold_the_tokens_drawn_and_no_more_than_top_k_of_drafted_ones_too(answers):
    """Of a text without the banned word: rules come before the filters."""
    result = answers["mask"]
    assert len(result.sampling_mask) == TOKENS == len(result.token_ids) and not answers["plain"].sampling_mask
    for token, kept in zip(result.token_ids.tolist(), result.sampling_mask, strict=True):
        assert token in kept and 28 not in kept and len(kept) <= 20
    assert len({len(kept) for kept in result.sampling_mask}) > 3
    assert result.accepted_tokens > 0


def test_the_likeliest_tokens_have_the_logprobs_that_draws_of_them_have(answers):
    tops = answers["tops"]
    assert [len(top) for top in tops.top_logprobs] == [3] * TOKENS and not answers["plain"].top_logprobs
    drawn = zip(tops.token_ids.tolist(), tops.logprobs.tolist(), tops.top_logprobs, strict=True)
    shared = [(dict(top)[token], logprob) for token, logprob, top in drawn if token in dict(top)]
    assert len(shared) > TOKENS // 2
    np.testing.assert_allclose(*zip(*shared, strict=True), atol=1e-4)


def test_a_pass_over_prompt_and_answer_scores_the_answer_as_it_was_drawn(engine, answers):
    plain = answers["plain"]
    context = chunk("plain", plain.token_ids)
    asked = SamplingParams(prompt_logprobs=2)
    changes = {"prompt_tokens": len(context.token_ids), "sampling": asked, "max_tokens": 1}
    (first,) = run(engine, replace(context, chunk_id="score", **changes))
    scored = run(engine, *(replace(context, chunk_id=f"score/{n}", **changes) for n in range(2)), chunk("plain"))
    assert len(first.prompt_logprobs.logprobs) == len(context.token_ids) - 1 and scored[2].prompt_logprobs is None
    for one in (first, *scored[:2]):
        found = one.prompt_logprobs
        np.testing.assert_allclose(found.logprobs[-TOKENS:], plain.raw_logprobs, atol=1e-3)
        for token, logprob, rank, top in zip(context.token_ids[1:], *dict(found).values(), strict=True):
            assert len(top) == 2 and top[0][1] >= top[1][1]
            assert rank > 2 or top[rank - 1] == (token, logprob)
    (goes_on,) = run(engine, replace(context, sampling=asked, max_tokens=1))
    assert goes_on.prompt_logprobs is None, "the first chunk of a sample has them"


def test_the_rules_are_kept(answers, words):
    tokens = {name: answer.token_ids.tolist() for name, answer in answers.items()}
    texts = {name: words.decode(one, skip_special_tokens=True) for name, one in tokens.items()}
    assert len(set(tokens["repetition"])) == len(tokens["repetition"]) and not set(tokens["repetition"]) & set(WORDS)
    assert 28 in tokens["plain"] and 28 not in tokens["bias"]
    assert "," not in texts["bad_words"] and "of the" not in texts["bad_words"]
    assert set(tokens["allowed"]) <= set(FEW)
    assert tokens["min_tokens"].index(EOS) == 20
    assert EOS in tokens["ignore_eos"][:-1] and len(tokens["ignore_eos"]) == TOKENS
    found = json.loads(texts["json"])
    assert set(found) == {"name", "age"} and found["age"] <= 99
    assert re.fullmatch(r"[a-f]{3}-[0-9]{4}", texts["regex"])
    assert texts["choice"] in ("a heron", "a hound")
    assert answers["stop"].end is ChunkEnd.STOP
    text, stop = cut(tokens["stop"], (" the", ","), words.decode)
    assert stop in (" the", ",") and " the" not in text and "," not in text
    assert tokens["stop"] == tokens["plain"][: len(tokens["stop"])]


def test_raw_logprobs_are_the_model_s_own(answers):
    """The first token's: the same context for all, and the same token for some."""
    first = {}
    for answer in answers.values():
        first.setdefault(int(answer.token_ids[0]), []).append(answer.raw_logprobs[0])
    assert any(len(values) > 1 for values in first.values())
    for values in first.values():
        np.testing.assert_allclose(values, values[0], atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"structured_outputs": {"json": "{"}}, "structured_outputs: Invalid JSON"),
        ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs: Failed to transform regex"),
        ({"allowed_token_ids": (10**6,)}, "1000000 is not in the vocabulary"),
        ({"logit_bias": {10**6: 1.0}}, "1000000 is not in the vocabulary"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused_in_one_line(engine, changes, reason):
    (result,) = run(engine, chunk("plain", chunk_id="refused", sampling=SamplingParams(**changes)))
    assert isinstance(result, ValueError) and reason in str(result) and "\n" not in str(result)


def test_the_formulas_are_vllm_s():
    from vllm.model_executor.layers.utils import apply_penalties

    context = np.array([3, 5, 5, 9, 5, 3, 7], np.int32)
    logits = torch.linspace(-2.0, 2.0, 12)
    expected, prompt, answer = logits.clone()[None], torch.tensor([[3, 5, 5]]), torch.tensor([[9, 5, 3, 7]])
    apply_penalties(expected, prompt, answer, *(torch.tensor([by]) for by in (0.5, 0.25, 1.5)))
    asked = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    LogitRules(rule_args(asked, []), 3, [2]).apply(logits, context)
    torch.testing.assert_close(logits, expected[0])


def test_a_stop_counts_once_its_last_token_completes_it_and_min_tokens_are_there():
    pieces = ["ab", "c ", "x", "abc", " y"]

    def decode(ids):
        return "".join(pieces[i] for i in ids)

    tokens = [0, 1, 2, 3, 4]
    assert first_end(tokens, 0, ["bc"], 0, decode) == 2 and first_end(tokens, 2, ["bc"], 0, decode) == 4
    assert first_end(tokens, 0, ["bc"], 3, decode) == 4 and first_end(tokens, 0, ["zz"], 0, decode) is None
    assert cut(tokens[:2], ["bc"], decode) == ("a", "bc") and cut(tokens[:4], ["bc"], decode) == ("abc xa", "bc")


def test_a_form_is_checked_before_it_is_compiled():
    assert form_refusal(StructuredOutputs(json=SCHEMA)) is None
    assert "\n" not in form_refusal(StructuredOutputs(grammar="root ::= nothing"))
