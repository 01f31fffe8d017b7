"""A text that is decoded when it is asked for is the one that the coordinator would have made."""

import asyncio
import copy
import json
import pickle

import numpy as np
import pytest
from test_sample_records import Words, chunk, record

from tailrace.app.calls.result_texts import ResultTexts
from tailrace.deployments.batches.answer_text import text_of
from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.batches.records import GroupRecord
from tailrace.deployments.batches.tokenizer_files import name_of_tokenizer, tokenizer_files
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, SampleResult
from tailrace.policies.protocol.actions import SampleEnd


class NamedWords(Words):
    tokenizer_name = "words"

    def __init__(self):
        self.decoded = 0

    def decode(self, token_ids) -> str:
        self.decoded += 1
        assert type(token_ids) is list, "tokenizers want lists"
        return super().decode(token_ids)


def ended(end: SampleEnd = SampleEnd.STOP, tokens=(4, 5, 6), **sampling):
    group = PromptGroup(prompt_id="p", token_ids=(1, 2, 3), samples=2, sampling=sampling)
    whole = GroupRecord.of("b", 7, Prepared(group, (1, 2, 3), 16, "key"), [1, 2])
    for sample in whole.samples:
        sample.append(0, chunk(tokens[:1]), "r1")
        sample.append(1, chunk(tokens[1:], version=2), "r2")
        sample.end = end
    return whole


def attached(group: GroupResult, prompts: NamedWords) -> GroupResult:
    for sample in group.samples:
        sample.decode_by(lambda token_ids, rule: text_of(token_ids, rule, prompts.decode))
    return group


CASES = [
    (SampleEnd.LENGTH, {}, ("4 5 6", None)),
    (SampleEnd.STOP, {}, ("4 5", None)),
    (SampleEnd.STOP, {"stop_token_ids": (6,)}, ("4 5", 6)),
    (SampleEnd.STOP, {"stop": ("5 6",)}, ("4 ", "5 6")),
    (SampleEnd.STOP, {"stop": ("7",), "stop_token_ids": (6,)}, ("4 5", 6)),
    (SampleEnd.CANCELLED, {"stop": ("5 6",)}, ("4 5 6", None)),
]


@pytest.mark.parametrize(("end", "sampling", "expected"), CASES)
def test_text_and_stop_are_those_of_the_coordinator(end, sampling, expected):
    prompts = NamedWords()
    group = ended(end, **sampling).result(prompts)
    assert prompts.decoded == 0
    for sample in attached(pickle.loads(pickle.dumps(group)), prompts).samples:
        assert (sample.text, sample.stop_reason) == expected == (sample.text, sample.stop_reason)
    one = ended(end, **sampling).samples[0].result(prompts)
    assert (one.text, one.stop_reason) == expected and one.tokenizer == ""


def test_our_own_values_would_pass_the_checks_that_are_skipped():
    group = attached(ended(stop_token_ids=(6,)).result(NamedWords()), NamedWords())
    checked = GroupResult.model_validate(group.model_dump())
    assert checked == group and checked.model_dump_json() == group.model_dump_json()
    assert set(group.samples[0].__dict__) == set(SampleResult.model_fields)
    assert set(group.__dict__) == set(GroupResult.model_fields)
    empty = record().samples[0]
    empty.end = SampleEnd.FAILED
    assert SampleResult.model_validate(empty.result(Words()).model_dump()) == empty.result(Words())


def copies():
    return [
        copy.copy,
        copy.deepcopy,
        lambda sample: sample.model_copy(),
        lambda sample: pickle.loads(pickle.dumps(sample)),
        lambda sample: SampleResult.model_validate_json(sample.model_dump_json()),
        lambda sample: SampleResult(**dict(sample)),
    ]


@pytest.mark.parametrize("again", copies())
def test_copies_carry_the_text(again):
    prompts = NamedWords()
    (sample, _) = attached(ended().result(prompts), prompts).samples
    found = again(sample)
    assert found.__dict__["text"] == "4 5" and found.tokenizer == "" and found == sample


def test_a_copy_with_other_tokens_keeps_the_text():
    prompts = NamedWords()
    (sample, _) = attached(ended().result(prompts), prompts).samples
    assert sample.model_copy(update={"token_ids": (9,)}).text == "4 5"


def test_a_text_is_decoded_once_and_json_has_it():
    prompts = NamedWords()
    (sample, other) = attached(ended().result(prompts), prompts).samples
    assert [sample.text, sample.text, sample.stop_reason] == ["4 5", "4 5", None] and prompts.decoded == 1
    assert json.loads(other.model_dump_json())["text"] == "4 5" and prompts.decoded == 2
    assert sample == other.model_copy(update={"sample_index": 0})


def test_without_a_decoder_there_is_no_text_and_the_error_says_so():
    (sample, _) = ended().result(NamedWords()).samples
    with pytest.raises(AttributeError, match="text: not decoded yet"):
        _ = sample.text
    assert pickle.loads(pickle.dumps(sample)).tokenizer == "words"
    assert sample == pickle.loads(pickle.dumps(sample))
    with pytest.raises(AttributeError, match="nothing"):
        _ = sample.nothing


def test_a_tokenizer_that_cannot_be_named_decodes_in_the_coordinator():
    class Unnamed(Words):
        tokenizer_name = ""

    assert [sample.text for sample in ended().result(Unnamed()).samples] == ["4 5", "4 5"]


def test_columns_of_an_ended_sample_are_laid_together_once():
    whole = ended()
    sample = whole.samples[0]
    sample.join()
    result = sample.result_without_text("words")
    assert result.token_ids.array is sample.columns["token_ids"].array and result.token_ids == (4, 5, 6)
    assert all(np.shares_memory(part.token_ids, result.token_ids.array) for part in sample.parts)
    assert [part.token_ids.tolist() for part in sample.parts] == [[4], [5, 6]] and result.versions == (0, 2, 2)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.safetensors").write_bytes(b"1")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    return tmp_path


def test_a_tokenizer_is_named_by_its_files_alone(folder):
    files = tokenizer_files(folder)
    assert list(files) == ["config.json", "tokenizer.json"] and name_of_tokenizer(files) == name_of_tokenizer({**files})
    before = name_of_tokenizer(files)
    (folder / "tokenizer.json").write_text("{ }")
    assert name_of_tokenizer(tokenizer_files(folder)) != before
    assert tokenizer_files(folder / "none") == {} and name_of_tokenizer({}) == ""


def test_files_are_asked_for_once_and_only_if_the_folder_has_others(folder):
    asked = []

    async def ask(call: str):
        asked.append(call)
        return str(folder) if call == "model_folder" else {"tokenizer.json": b"other"}

    async def story(name: str) -> list[str]:
        asked.clear()
        texts, prompts = ResultTexts(ask), NamedWords()
        prompts.tokenizer_name = name
        for _ in range(2):
            await texts.attach(group := ended().result(prompts))
        return [*asked, group]

    here = name_of_tokenizer(tokenizer_files(folder))
    assert asyncio.run(story(here))[:-1] == ["model_folder"]
    *calls, group = asyncio.run(story("gone"))
    assert calls == ["model_folder", "tokenizer_files"]
    with pytest.raises(LookupError, match="is not the one of these tokens any more"):
        _ = group.samples[0].text
