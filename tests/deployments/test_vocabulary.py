"""Two vocabularies agree, or one line names what differs."""

import json
import re

import pytest

from tailrace.deployments.vllm_exact.tokenizer_check import vocabulary_refusal

TOKENS = ["<s>", "</s>", "<pad>", "two", "roads", "met"]


def folder(path, tokens=TOKENS, outputs=None, eos="</s>", pad="<pad>"):
    """A model folder without weights: a tokenizer of whole words, ids in their order."""
    path.mkdir()
    specials = [token for token in tokens if token.startswith("<")]
    added = [
        {"id": tokens.index(token), "content": token, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for token in specials
    ]  # fmt: skip
    model = {"type": "WordLevel", "vocab": {token: place for place, token in enumerate(tokens)}, "unk_token": "<pad>"}
    whole = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (path / "tokenizer.json").write_text(json.dumps(whole))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos, "pad_token": pad}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    (path / "config.json").write_text(json.dumps({"vocab_size": outputs or len(tokens)}))
    return path


@pytest.fixture
def target(tmp_path):
    return folder(tmp_path / "target", outputs=8)


@pytest.mark.parametrize("same", [{}, {"outputs": 8}, {"pad": "</s>"}])
def test_the_same_tokens_are_no_refusal(tmp_path, target, same):
    """Nor are fewer outputs behind them, or another padding."""
    assert vocabulary_refusal(target, folder(tmp_path / "drafter", **same)) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"tokens": [*TOKENS, "again"]}, "has 7 tokens, the target 6"),
        ({"tokens": [*TOKENS[:4], "met", "roads"]}, "'roads' is id 4 in the target, id 5 in the drafter"),
        ({"tokens": [*TOKENS[:5], "part"]}, "'met' is id 5 in the target, absent in the drafter"),
        ({"eos": "<pad>"}, "its eos_token is '<pad>', the target's '</s>'"),
        ({"outputs": 9}, "it puts out 9 ids, the target takes 8"),
    ],
)
def test_what_differs_is_named_in_one_line(tmp_path, target, other, said):
    refusal = vocabulary_refusal(target, folder(tmp_path / "drafter", **other))
    assert re.search(re.escape(said), refusal) and "\n" not in refusal
    assert "drafter" in refusal and "target" in refusal


def test_a_folder_without_a_vocabulary_is_an_error(tmp_path, target):
    drafter = folder(tmp_path / "drafter")
    (drafter / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no vocab_size"):
        vocabulary_refusal(target, drafter)
