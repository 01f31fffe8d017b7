"""Features of prompts: their form, their names, and all that is refused before a model sees it."""

import asyncio
import gc
import pickle
import re
import threading
from base64 import b64encode
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from image_model import encoded, features, item, pixels
from pydantic import ValidationError

from tailrace.app.calls.session import prompt_name
from tailrace.app.gateway.requests import TokensRequest
from tailrace.deployments.batches.held_samples import HeldRecords
from tailrace.deployments.batches.model_folder import names_media
from tailrace.deployments.batches.open_batch import GroupIdentity
from tailrace.deployments.batches.open_sessions import OpenSessions
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.batches.records import GroupRecord, SampleRecord
from tailrace.deployments.features import kept_items, wire
from tailrace.deployments.features.encoder import encode_alone
from tailrace.deployments.features.item_check import item_refusal
from tailrace.deployments.features.prompt_features import PromptFeatures, continues
from tailrace.deployments.features.wire import Features
from tailrace.deployments.messages.logged_tokens import group_digest
from tailrace.deployments.messages.rollout import BatchSettings, PromptGroup, Rejected, RejectedBy
from tailrace.deployments.messages.session import SampleRequest
from tailrace.deployments.vllm_exact.requests import features_unfit

TOKENS = tuple(range(20))


class Numerals(Prompts):
    """Prompts whose text is their token ids."""

    def __init__(self, is_multimodal: bool):
        self.model, self.max_model_len, self.is_multimodal, self._vocabulary = "/models/tiny", 64, is_multimodal, 100
        self._ends = frozenset()

    def decode(self, token_ids: list[int], special: bool = False) -> str:
        return " ".join(map(str, token_ids))


def group(given: dict | None, **changes) -> PromptGroup:
    return PromptGroup(**{"prompt_id": "p", "token_ids": TOKENS, "features": given, "samples": 1} | changes)


def prepared(given: dict | None, is_multimodal: bool = True):
    return Numerals(is_multimodal).prepare_group(group(given))


def of(given: dict) -> PromptFeatures:
    return PromptFeatures.of(Features.model_validate(given))


def test_an_image_is_named_by_its_content_and_never_by_the_hash_that_was_sent():
    one, other = of(features((1, 3))), of(features((2, 3)))
    assert one.items[0].name != other.items[0].name and one.name != other.name
    assert of(features((1, 3), mm_hashes={"image": ["another"]})).name == one.name
    moved = of(features((1, 4)))
    assert moved.items[0].name == one.items[0].name and moved.name != one.name
    padded = of(features((1, 3), mm_metadata={"image": [encoded({"n": item(pixels(1))["num_patches"]})]}))
    assert padded.items[0].name != one.items[0].name


def test_items_are_in_the_order_of_the_prompt():
    assert [one.offset for one in of(features((1, 9), (2, 3))).items] == [3, 9]


def without_first(*images: tuple[int, int]) -> dict:
    """Features whose first image has a name in place of its data."""
    given = Features.model_validate(features(*images))
    hashes = {"image": [one.name for one in PromptFeatures.of(given).items]}
    return given.model_copy(update={"mm_hashes": hashes}).without({hashes["image"][0]}).model_dump()


def test_an_item_without_data_is_the_one_of_its_name_that_a_prompt_has():
    prompts, both = Numerals(True), ((1, 3), (2, 9))
    first = prompts.prepare_group(group(features((1, 3))))
    second = prompts.prepare_group(group(without_first(*both)))
    assert (
        second.features.name == of(features(*both)).name and second.prompt_key == prepared(features(*both)).prompt_key
    )
    assert second.features.items[0].data is first.features.items[0].data and len(prompts._items) == 2
    elsewhere = prompts.prepare_group(group(without_first((1, 12))))
    assert elsewhere.features.items[0].data is first.features.items[0].data
    assert GroupIdentity.of(second) == GroupIdentity.of(prompts.prepare_group(group(features(*both))))
    named_as_first = features((2, 3), mm_hashes={"image": [first.features.items[0].name]})
    assert prompts.prepare_group(group(named_as_first)).features.name == of(features((2, 3))).name


def test_nothing_is_kept_for_those_that_may_come(monkeypatch):
    prompts, short = Numerals(True), without_first((1, 3), (2, 9))
    whole = prompts.prepare_group(group(features((1, 3))))
    del whole
    gc.collect()
    refused = prompts.prepare_group(group(short))
    assert refused.by is RejectedBy.DATA and len(prompts._items) == 0
    assert refused.reason.endswith(
        "features: item 0 of 'image': it has no data, and the service has none by its hash; send them"
    )
    kept = prompts.prepare_group(group(features((1, 3))))
    as_video = {name: {"video": of["image"]} for name, of in without_first((1, 3)).items() if of}
    assert prompts.prepare_group(group(as_video)).by is RejectedBy.DATA
    monkeypatch.setattr(kept_items, "MAX_BYTES", len(kept.features.items[0].data.content) * 3 // 2)
    assert "bytes; a prompt has at most" in prompts.prepare_group(group(short)).reason
    by_another_hash = features((1, 3), kwargs_data={"image": [""]})
    assert prompts.prepare_group(group(by_another_hash)).by is RejectedBy.DATA


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kwargs_data": None}, "kwargs_data: give the data of every item"),
        ({"kwargs_data": {"image": [None]}}, "kwargs_data: give the data of every item"),
        ({"kwargs_data": {"image": []}}, "kwargs_data: give as many items"),
        ({"mm_metadata": {"video": [None]}}, "mm_metadata: give as many items"),
        ({"mm_placeholders": {"image": [{"offset": 0, "length": 0}]}}, "greater than or equal to 1"),
        ({"mm_placeholders": {"image": [{"offset": -1, "length": 1}]}}, "greater than or equal to 0"),
        ({"is_embed": []}, "not permitted"),
    ],
)
def test_what_vllm_s_form_has_not_is_refused(changes, reason):
    with pytest.raises(ValidationError, match=reason):
        Features.model_validate(features((1, 3), **changes))


def test_bounds_of_a_prompt(monkeypatch):
    with pytest.raises(ValidationError, match="two of them overlap"):
        Features.model_validate(features((1, 3), (2, 6)))
    assert Features.model_validate(features((1, 3), (2, 7))).end == 11
    monkeypatch.setattr(wire, "MAX_ITEMS", 1)
    with pytest.raises(ValidationError, match="2 items; a prompt has at most 1"):
        Features.model_validate(features((1, 3), (2, 7)))
    monkeypatch.setattr(wire, "MAX_BYTES", 1000)
    with pytest.raises(ValidationError, match="bytes; a prompt has at most 1000"):
        Features.model_validate(features((1, 3)))


def test_placeholders_are_in_a_prompt_of_token_ids():
    with pytest.raises(ValidationError, match="a placeholder ends at 21, the prompt has 20 tokens"):
        group(features((1, 17)))
    with pytest.raises(ValidationError, match="features: give the prompt as token_ids"):
        group(features((1, 3)), token_ids=None, text="a")


def tensor(*parts) -> dict:
    return {"x": {"data": list(parts), "field": ["batched", {"keep_on_cpu": False}]}}


FOUR = msgspec.msgpack.Ext(3, b"\0" * 4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (tensor("float32", [1], msgspec.msgpack.Ext(1, pickle.dumps(print))), "extension 1: tensors alone"),
        (tensor("float32", [1], msgspec.msgpack.Ext(2, b"")), "extension 2: tensors alone"),
        (tensor("float32", [2], FOUR), r"shape \[2\] has 4 bytes"),
        (tensor("float32", [-1, -1], FOUR), "a list of numbers"),
        (tensor("float32", [1], 0), "a tensor is"),
        (tensor("load", [1], FOUR), "a tensor is"),
        (tensor("qint8", [4], FOUR), "a tensor is"),
        ({"x": {"data": None, "field": ["batched", {}]}}, "neither numbers nor tensors"),
        ({"x": {"data": [[[[[[[1]]]]]]], "field": ["batched", {}]}}, "neither numbers nor tensors"),
        ({"x": {"data": 1, "field": ["__init__", {}]}}, "a field is one of batched, flat, shared"),
        (
            {"x": {"data": 1, "field": ["batched", {"modality": "audio"}]}},
            "has keep_on_cpu, not modality",
        ),
        ({"x": {"data": 1, "field": ["shared", {"batch_size": "a"}]}}, "batch_size is a number"),
        ({"x": {"data": 1, "field": ["flat", {"slices": [["a", 1, 1]]}]}}, "lists of three numbers"),
        ({"x": {"data": 1, "field": ["flat", {"slices": []}]}}, "lists of three numbers"),
        ({"image_embeds": tensor("float32", [1], FOUR)["x"]}, "inputs of the encoder, not its embeddings"),
        ({"x": {"data": 1}}, "has not the form"),
        ({}, "no fields"),
        ([1], "no fields"),
    ],
)
def test_an_item_is_of_tensors_and_numbers_alone(fields, reason):
    bad = features((1, 3), kwargs_data={"image": [encoded(fields)]})
    for refused in (prepared(bad), prepared(features((1, 3), mm_metadata={"image": [encoded(fields)]}))):
        assert isinstance(refused, Rejected) and "\n" not in refused.reason
        assert re.search(reason, refused.reason), refused.reason


def test_an_item_that_is_cut_or_no_base64_is_refused():
    whole = msgspec.msgpack.encode(item(pixels(1)))
    assert item_refusal(whole) is None
    assert all(item_refusal(whole[:end]) is not None for end in range(0, len(whole), 997))
    refused = prepared(features((1, 3), kwargs_data={"image": ["@@@@"]}))
    assert "features: item 0 of 'image': it is not base64" in refused.reason
    nested = b64encode(b"\x91" * 100_000).decode()
    assert isinstance(prepared(features((1, 3), kwargs_data={"image": [nested]})), Rejected)


def test_a_model_of_text_alone_refuses_images_and_takes_none(tmp_path):
    refused = prepared(features((1, 3)), is_multimodal=False)
    assert refused.reason == "prompt 'p': features: the model tiny takes text alone; remove them"
    assert prepared(features(), is_multimodal=False).features is None is prepared(None, is_multimodal=False).features
    config = tmp_path / "config.json"
    for text, seen in (('{"model_type": "llama", "vocab_size": 9}', False), ('{"vision_config": {}}', True)):
        config.write_text(text)
        assert names_media(tmp_path) == seen


def test_vllm_s_own_word_on_a_model_decides_in_an_engine():
    plain = {"is_multimodal_model": True, "is_mm_prefix_lm": False, "is_encoder_decoder": False}
    assert features_unfit(SimpleNamespace(**plain)) is None
    assert "text alone" in features_unfit(SimpleNamespace(**plain | {"is_multimodal_model": False}))
    assert "later tokens" in features_unfit(SimpleNamespace(**plain | {"is_mm_prefix_lm": True}))


def test_each_item_is_encoded_by_itself():
    @dataclass
    class Scheduled:
        scheduled_encoder_inputs: dict[str, list[int]]
        step: int = 3

    asked = []
    runner = SimpleNamespace(_execute_mm_encoder=lambda scheduled: asked.append(scheduled) or [len(asked)])
    encode_alone(runner)
    assert runner._execute_mm_encoder(Scheduled({"a": [0, 2], "b": [1]})) == [1, 2, 3]
    assert asked == [Scheduled({"a": [0]}), Scheduled({"a": [2]}), Scheduled({"b": [1]})]


def test_equal_tokens_with_different_images_are_different_prompts():
    one, other, none = prepared(features((1, 3))), prepared(features((2, 3))), prepared(None)
    assert len({each.prompt_key for each in (one, other, none)}) == 3
    assert len({GroupIdentity.of(each) for each in (one, other, none)}) == 3
    assert GroupIdentity.of(one) == GroupIdentity.of(prepared(features((1, 3), mm_hashes={"image": ["b"]})))
    assert len({group_digest(group(given), 0) for given in (features((1, 3)), features((2, 3)), None)}) == 3


def test_the_group_of_a_request_without_a_name_is_that_of_its_tokens_and_images():
    def named(given: dict | None) -> str:
        return prompt_name(TokensRequest(token_ids=TOKENS, features=given).prompt())

    assert len({named(features((1, 3))), named(features((2, 3))), named(None)}) == 3
    assert named(features((1, 3), mm_hashes={"image": ["b"]})) == named(features((1, 3)))
    assert named(features()) == named(None) == prompt_name({"token_ids": TOKENS})


def test_a_later_turn_has_the_earlier_images_where_they_were_and_new_ones_after_them():
    first, both = of(features((1, 3))), of(features((1, 3), (2, 40)))
    assert continues(first, both, 30) and continues(first, first, 30) and continues(None, None, 30)
    assert continues(None, of(features((2, 40))), 30)
    assert not continues(first, both, 41), "an image in the context, which was text"
    assert not continues(both, first, 50) and not continues(first, None, 30)
    assert not continues(first, of(features((2, 3))), 30) and not continues(first, of(features((1, 4))), 30)


def test_a_request_continues_a_held_sample_if_its_images_are_the_same():
    first = prepared(features((1, 3)))
    record = GroupRecord("b", 0, first.group, np.array(TOKENS, np.int32), "key", features=first.features)
    held, later = HeldRecords(), {"token_ids": (*TOKENS, 8, 8, 9)}
    held.hold("b/p#0", SampleRecord(record, 0, 1, None))

    def returning(given: dict | None):
        asked = group(given, **later)
        return held.returning(Numerals(True).prepare_group(asked), SampleRequest(group=asked, turn=1), 0.0)

    assert returning(features((1, 3))).outside_tokens == 3
    assert returning(features((1, 3), (2, 20), length=3)) is None, "the first image has another length"
    short = features((1, 3), (2, 20))
    short["mm_placeholders"]["image"][1]["length"] = 3
    assert returning(short).sample_id == "b/p#0"
    assert returning(features((2, 3))) is None is returning(None)


def test_features_cross_processes_whole():
    one = of(features((1, 3)))
    again = pickle.loads(pickle.dumps(one))
    assert (again.name, again.end) == (one.name, 7)
    ((offset, length, data),) = again.items
    known = one.items[0].data
    assert (offset, length, data.modality, data.name) == (3, 4, known.modality, known.name)
    assert (data.content, data.metadata) == (known.content, known.metadata)


class HeldPrompts:
    """Prompts that are refused once `hold` is set. `begun`: by name, in order."""

    def __init__(self):
        self.begun, self.hold = [], threading.Event()

    def prepare_group(self, group: PromptGroup) -> Rejected:
        self.begun.append(group.prompt_id)
        self.hold.wait()
        return Rejected(reason=group.prompt_id)


class Open:
    """Admits everything."""

    async def refusal(self, message: BatchSettings) -> None:
        return None


def test_prompts_with_features_are_prepared_in_order_and_texts_do_not_wait_for_them():
    prompts, settings = HeldPrompts(), BatchSettings(batch_id="s")
    sessions = OpenSessions(prompts, None, None, None, Open(), None, None, None)

    def asked(name: str, given: dict | None) -> asyncio.Task:
        request = SampleRequest(group=group(given, prompt_id=name), index=0)
        return asyncio.ensure_future(sessions.generate(settings, request))

    async def story():
        asks = [asked("first", features((1, 3))), asked("mate", features((1, 3))), asked("text", None)]
        while len(prompts.begun) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        begun = [*prompts.begun]
        prompts.hold.set()
        return begun, [answer.reason for answer in await asyncio.gather(*asks)]

    begun, reasons = asyncio.run(story())
    assert begun == ["first", "text"], "the mate may have no data of its own"
    assert prompts.begun == ["first", "text", "mate"] and reasons == ["first", "mate", "text"]
