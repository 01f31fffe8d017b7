"""vLLM's processor of a tiny model in the process of `ImageProcessor`: features of files, and what it refuses."""

import json
import shutil
from base64 import b64decode
from io import BytesIO

import pytest
from image_model import IMAGE_ID, IMAGE_TOKENS, picture
from PIL import Image

from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.chat.conversations import Conversations
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.images.image_processor import ImageProcessor
from tailrace.app.gateway.images.sent_image import SentImage
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.features.item_check import item_refusal
from tailrace.deployments.features.prompt_features import PromptFeatures


@pytest.fixture(scope="module")
def images(image_folder):
    found = ImageProcessor(str(image_folder))
    yield found
    found.close()


@pytest.fixture(scope="module")
def texts_folder(image_folder, tmp_path_factory):
    """The same model with a chat template that takes texts alone."""
    folder = tmp_path_factory.mktemp("texts") / "model"
    shutil.copytree(image_folder, folder)
    for file in folder.glob("*.json"):
        found = json.loads(file.read_text())
        if isinstance(found, dict) and found.pop("chat_template", None):
            file.write_text(json.dumps(found))
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def images_of_texts(texts_folder):
    """Those of another gateway."""
    found = ImageProcessor(str(texts_folder))
    yield found
    found.close()


def sent(*seeds: int, **of) -> list[SentImage]:
    return [SentImage.of(picture(seed, **of)) for seed in seeds]


OWN = "<fake_token_around_image><global-img>" + "<image>" * IMAGE_TOKENS + "<fake_token_around_image>"
"""An image's part of a prompt's text."""

MARKED = [65, IMAGE_ID, 66]


def test_the_form_is_the_template_s(images):
    form = images.form()
    assert form.in_parts and form.chat_template is None and form.marks[0] == form.marks[255] == "<image>"


def test_an_item_is_one_that_engines_take_in_its_own_placeholder(images):
    found = images.process(sent(1), MARKED)
    (span,) = found.spans
    own = found.token_ids[span.offset : span.offset + span.length]
    assert own == [IMAGE_ID] * IMAGE_TOKENS == [token for token in found.token_ids if token == IMAGE_ID]
    assert found.token_ids[0] == 65 and found.token_ids[-1] == 66 and len(found.token_ids) > 2 + IMAGE_TOKENS
    assert item_refusal(b64decode(found.items[0])) is None


def test_an_image_is_the_same_whatever_is_beside_it_and_however_often_it_is_sent(images, images_of_texts):
    alone = [images.process(sent(seed), MARKED) for seed in (1, 2)]
    both = images.process(sent(2, 1, 2), [IMAGE_ID, 65, IMAGE_ID, IMAGE_ID])
    assert both.names == (alone[1].names[0], alone[0].names[0], alone[1].names[0])
    assert both.items[1] == alone[0].items[0] and len(both.spans) == 3
    last = images.process(sent(2, 1), [65, IMAGE_ID], placed=1)
    assert last.names == both.names[:2] and len(last.spans) == 1
    found = images.process(sent(1), placed=1)
    assert found.names == alone[0].names and found.token_ids == [] and found.spans == ()
    assert images_of_texts.process(sent(2, 1), [IMAGE_ID, IMAGE_ID]).names == both.names[:2]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_kind_of_file_is_taken(images, kind):
    assert len(images.process(sent(5, kind=kind), MARKED).spans) == 1


def test_what_is_no_image_is_refused_by_its_number_and_the_next_one_is_taken(images):
    cut = SentImage.of_file(sent(7)[0].content[:60])
    wide = BytesIO()
    Image.new("1", (30_000, 3_000)).save(wide, "PNG")
    for wrong, reason in (
        (cut, "image 2: "), (SentImage.of_file(b"GIF"), "image 2: its file is none of JPEG, PNG, WEBP, GIF"),
        (SentImage.of_file(wide.getvalue()), "image 2: it has 30000 x 3000 pixels; send at most 89478485"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"messages: {reason}") as caught:
            images.process([*sent(1), wrong], [IMAGE_ID, IMAGE_ID])
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="the chat template has no place for each of the images"):
        images.process(sent(1, 2), MARKED)
    assert len(images.process(sent(1), MARKED).spans) == 1


def test_a_model_of_text_alone_has_no_processor(model_dir):
    processor = ImageProcessor(str(model_dir))
    assert not processor.form().in_parts
    with pytest.raises(ValueError, match=r"messages: 1 images: .*the model takes text alone; remove them"):
        processor.check(1)
    processor.close()


def test_a_chat_has_the_prompt_of_the_template_with_its_images(images, image_folder):
    prompts, turns = Prompts(str(image_folder), 512), Conversations(10_000)

    def chat(*messages) -> Chat:
        return Chat(ChatRequest(messages=messages), prompts, turns, None, images)

    def user(*seeds: int) -> dict:
        parts = [{"type": "image_url", "image_url": {"url": picture(seed)}} for seed in seeds]
        return {"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}

    found = chat(user(1, 2))
    text = prompts.decode(list(found.token_ids), special=True)
    assert text == f"<user>{OWN}{OWN}What?<eos><assistant>"
    features = PromptFeatures.of(found.features)
    for item in features.items:
        assert set(found.token_ids[item.offset : item.offset + item.length]) == {IMAGE_ID}
    other = chat(user(1, 3))
    assert other.token_ids == found.token_ids and other.images != found.images


def test_a_template_of_texts_gets_the_model_s_marks(images_of_texts, texts_folder):
    prompts = Prompts(str(texts_folder), 512)
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": picture(1)}}]
    asked = ChatRequest(messages=[{"role": "user", "content": parts}])
    found = Chat(asked, prompts, Conversations(1_000), None, images_of_texts)
    text = prompts.decode(list(found.token_ids), special=True)
    assert not images_of_texts.form().in_parts and text == f"<user>{OWN}\nWhat?<eos>"


def test_a_prompt_is_the_one_that_vllm_s_own_renderer_makes(images, image_folder):
    """As its `/render` does: token ids, placeholders and items, in a conversation with a tool's result."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item
    from vllm.renderers.params import ChatParams
    from vllm.renderers.registry import renderer_from_config

    def image(seed: int, **of) -> dict:
        return {"type": "image_url", "image_url": {"url": picture(seed, **of)}}

    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [image(1), {"type": "text", "text": "a"}, image(2, kind="JPEG", side=64)]},
        {"role": "assistant", "content": "I do."},
        {"role": "tool", "content": [{"type": "text", "text": "b"}, image(3, kind="GIF")], "tool_call_id": "t"},
        {"role": "user", "content": "c"},
    ]
    config = EngineArgs(model=str(image_folder), dtype="float32", max_model_len=512).create_engine_config()
    asked = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    renderer = renderer_from_config(config)
    _, (theirs,) = renderer.render_chat([messages], asked)
    renderer.shutdown()
    ours = Chat(ChatRequest(messages=messages), Prompts(str(image_folder), 512), Conversations(9), None, images)
    assert list(ours.token_ids) == theirs["prompt_token_ids"]
    spans, items = theirs["mm_placeholders"]["image"], theirs["mm_kwargs"]["image"]
    for one, span, item, own in zip(ours.images, spans, items, ours.features.kwargs_data["image"], strict=True):
        embedded = [span.offset + place for place, is_own in enumerate(span.is_embed.tolist()) if is_own]
        assert embedded == list(range(one.offset, one.offset + one.length))
        decoded = decode_mm_kwargs_item(own)  # beside its data, theirs has the places of its mates in a batch
        assert decoded.keys() == item.keys() and all(decoded[name].data.equal(item[name].data) for name in item)
