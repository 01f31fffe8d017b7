"""Images of chats without vLLM: what a request may send, forms of templates, and what a chat makes of turns."""

import json
import struct
import sys
import zlib
from base64 import b64encode
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from fake_images import MARK, FakeImages, flat, picture, url
from image_model import IMAGE_TOKENS
from PIL import Image

from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.chat.conversations import Conversations
from tailrace.app.gateway.chat.messages import RequestedMessage
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.images import image_processor, processing, sent_image
from tailrace.app.gateway.images.image_form import ImageForm
from tailrace.app.gateway.images.image_processor import ImageProcessor
from tailrace.app.gateway.images.sent_image import SentImage
from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.messages.rollout import SampleResult
from tailrace.policies.protocol.actions import SampleEnd

END = 0


class Numbered:
    """Prompts whose texts are token ids: 3 before a user's message, 4 before an answer, END after each."""

    model, closing = "/models/seeing", str(END)
    tokenizer = SimpleNamespace(chat_template="")

    def chat(self, messages, add_generation_prompt=True, **template) -> str:
        texts = [f"{3 if one['role'] == 'user' else 4} {one['content']} {END}" for one in flat(messages)]
        return " ".join([*texts, "4"] if add_generation_prompt else texts)

    def encode(self, text: str, special: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids, special: bool = False) -> str:
        return " ".join(map(str, token_ids))

    def piece(self, token_id: int) -> str:
        return str(token_id)


def user(*parts) -> dict:
    return {"role": "user", "content": list(parts)}


def answered(chat: Chat, *token_ids: int) -> dict:
    """The message of an answer, which the chat keeps."""
    message = {"role": "assistant", "content": " ".join(map(str, token_ids[:-1]))}
    same = {"logprobs": (-1.0,) * len(token_ids), "raw_logprobs": (-1.0,) * len(token_ids)}
    sample = SampleResult(sample_index=0, text="", token_ids=token_ids, finish_reason=SampleEnd.STOP, **same)
    chat.keep(message, chat.token_ids, sample)
    return message


@pytest.fixture
def images() -> FakeImages:
    return FakeImages()


@pytest.fixture
def chat(images):
    turns = Conversations(1_000)
    return lambda *messages: Chat(ChatRequest(messages=messages), Numbered(), turns, None, images)


PLACEHOLDER = (MARK,) * IMAGE_TOKENS


def test_a_prompt_has_an_image_s_placeholder_and_its_features(chat):
    found = chat(user(picture(1), "5 6"))
    assert found.token_ids == (3, *PLACEHOLDER, 5, 6, END, 4)
    (image,) = found.images
    assert (image.offset, image.length, image.sent) == (1, IMAGE_TOKENS, b"1")
    (item,) = PromptFeatures.of(found.features).items
    assert (item.name, item.offset) == (image.name, 1) and found.features.mm_hashes["image"] == (image.name,)
    assert found.prompt == {"token_ids": found.token_ids, "features": found.features}
    text = chat({"role": "user", "content": "5"})
    assert text.prompt == {"token_ids": (3, 5, END, 4)} and text.images == ()


def test_a_second_turn_keeps_the_answer_s_tokens_and_the_places_of_earlier_images(chat, images):
    first = chat(user(picture(1), "5"))
    message = answered(first, 8, 9, END)
    second = chat(user(picture(1), "5"), message, user("6", picture(2)))
    before = (*first.token_ids, 8, 9, END)
    assert second.token_ids == (*before, 3, 6, *PLACEHOLDER, END, 4)
    assert [one.offset for one in second.images] == [1, len(before) + 2]
    assert images.processed == [[1], [1, 2]] and images.placed == [0, 1]
    third = chat(user(picture(1), "5"), message, {"role": "user", "content": "7"})
    assert third.token_ids == (*before, 3, 7, END, 4) and [one.offset for one in third.images] == [1]
    assert [one.place for one in third.images] == [one.place for one in first.images]


def test_another_image_of_equal_tokens_is_another_conversation(chat, images):
    first = chat(user(picture(1), "5"))
    message = answered(first, 88, END)
    message = {**message, "content": "8 8"}  # as the message's text would be encoded again
    first.keep(message, first.token_ids, SampleResult(
        sample_index=0, text="", token_ids=(88, END), finish_reason=SampleEnd.STOP,
        logprobs=(-1.0,) * 2, raw_logprobs=(-1.0,) * 2,
    ))  # fmt: skip
    same = chat(user(picture(1), "5"), message, user("7"))
    other = chat(user(picture(2), "5"), message, user("7"))
    assert 88 in same.token_ids and 88 not in other.token_ids and images.placed == [0, 1, 0]
    assert same.images[0].place != other.images[0].place


def test_a_model_of_text_alone_says_so(images):
    for parts in ([picture(1)], [{"type": "image_url", "image_url": "https://a.b/c.png"}], [{"type": "input_image"}]):
        request = ChatRequest(messages=[user(*parts)])
        with pytest.raises(ValueError, match="messages: an image: the model seeing takes text alone; remove it"):
            Chat(request, Numbered(), Conversations(9), None, None)


def test_images_beyond_the_limits_are_refused_in_one_line(chat, monkeypatch):
    monkeypatch.setattr(image_processor, "MAX_ITEMS", 2)
    with pytest.raises(ValueError, match="messages: 3 images; a prompt has at most 2, so leave some out"):
        chat(user(*map(picture, (1, 2, 3))))
    monkeypatch.setattr(sent_image, "MAX_SENT_BYTES", 2)
    with pytest.raises(ValueError, match="messages: an image's file has 3 bytes; send 1 to 2"):
        chat(user(picture(100)))
    with pytest.raises(ValueError, match="role 'system'; send it in one of the user"):
        chat({"role": "system", "content": [picture(1)]})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("https://a.b/c.png", "not fetched from an address; send its file as data:image/png;base64"),
        ("file:///etc/passwd", "not fetched from an address"),
        ("data:image/svg+xml;base64,AAAA", "png, jpeg, webp or gif"),
        ("data:text/plain;base64,AAAA", "png, jpeg, webp or gif"),
        ("data:image/png,AAAA", "png, jpeg, webp or gif"),
        ("data:image/png;base64,A@==", "is not base64"),
        ("data:image/png;base64,", "an image's file has 0 bytes"),
        (None, "not fetched from an address"),
        (7, "not fetched from an address"),
    ],
)
def test_only_a_file_in_a_data_url_is_an_image(given, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        SentImage.of(given)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("messages: an image")


def normal(*parts) -> dict:
    return RequestedMessage(**user(*parts)).normal()


def test_a_message_s_meaning_has_its_images_and_their_order():
    same = {"type": "input_image", "image_url": url(1), "detail": "high"}
    assert normal(picture(1), "5") == normal(same, {"type": "input_text", "text": "5"})
    different = normal(picture(1), "5"), normal(picture(2), "5"), normal("5", picture(1)), normal("5"), normal("15")
    assert all(one not in different[:place] for place, one in enumerate(different))


def lines(form: ImageForm, *messages: dict) -> list:
    return [one["content"] for one in form.lines([RequestedMessage(**one).for_template() for one in messages])]


def test_a_template_of_texts_has_marks_and_one_of_parts_has_parts():
    texts = ImageForm(marks=("<1>", "<2>", "<3>"))
    asked = (
        user("a", picture(1), picture(2)), {"role": "assistant", "content": None},
        {"role": "tool", "content": "t"}, user(picture(3)),
    )  # fmt: skip
    assert lines(texts, *asked) == ["<1>\n<2>\na", "", "t", "<3>"]
    assert lines(texts, user("see <1> here", picture(1))) == ["see <1> here"], "the text says where, as in vLLM"
    with pytest.raises(ValueError, match="messages: a text has 2 times '<1>' beside 1 images; remove it"):
        lines(texts, user("<1><1>", picture(1)))
    image, text = {"type": "image"}, {"type": "text", "text": "a"}
    assert lines(ImageForm(in_parts=True), *asked) == [[text, image, image], [], "t", [image]]
    assert lines(ImageForm(in_parts=True), {"role": "user", "content": "a"}) == [[text]]
    assert lines(ImageForm(), {"role": "user", "content": "a"}) == ["a"]


# ---- files -------------------------------------------------------------------------------------------


def png_of_size(width: int, height: int) -> bytes:
    """The file of an image whose head alone is there."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = head, b"IDAT"
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks
    )


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_file_of_too_many_pixels_is_refused_by_its_head(side):
    with pytest.raises((ValueError, Image.DecompressionBombError), match=r"pixels"):
        processing.opened(png_of_size(side, side))


def test_a_file_of_another_kind_is_refused():
    file = BytesIO()
    Image.new("RGB", (4, 4)).save(file, "BMP")
    for content in (file.getvalue(), b"no image"):
        with pytest.raises(ValueError, match="its file is none of JPEG, PNG, WEBP, GIF"):
            processing.opened(content)


def test_a_placeholder_is_narrowed_to_the_image_s_own_tokens():
    def found(*is_embed: int) -> SimpleNamespace:
        return SimpleNamespace(offset=10, length=len(is_embed), is_embed=np.array(is_embed, bool))

    assert processing.span_of(SimpleNamespace(offset=3, length=5, is_embed=None)) == (3, 5)
    assert processing.span_of(found(0, 0, 1, 1, 0)) == (12, 2)
    for wrong in (found(1, 0, 1), found(0, 0)):
        with pytest.raises(ValueError, match="other tokens among those of an image, which engines here do not take"):
            processing.span_of(wrong)


CHILD = """
import json, sys
print(json.dumps(%s), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["token_ids"] == [0]:
        sys.exit(3)
    with open("asked.jsonl", "a") as file:
        file.write(line)
    items = {one[1]: ["n" + one[1][:2], "i" * 5] for one in asked["images"] if one[1] not in asked["known"]}
    print(json.dumps({"refused": "image 1: no"} if asked["token_ids"] == [1] else {
        "items": items, "token_ids": asked["token_ids"], "spans": [[0, 1]] * len(asked["new"])
    }), flush=True)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Makes a processor over a process that begins with `first`."""
    made = []

    def make(first: dict) -> ImageProcessor:
        (tmp_path / "child_of_images.py").write_text(CHILD % repr(first))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(image_processor, "MODULE", "child_of_images")
        made.append(ImageProcessor("folder"))
        return made[-1]

    yield make
    for one in made:
        one.close()


SENT = SentImage.of(url(1))


def name_of(image: SentImage) -> str:
    """Its name by the process of these tests."""
    return "n" + image.digest[:2]


def test_the_process_of_images_starts_at_the_first_chat_and_again_after_its_end(child):
    processor = child({"form": {"in_parts": True, "marks": ["<1>"], "chat_template": None}})
    assert processor._process is None and processor.thread_for(False) is processor.thread
    assert processor.form() == ImageForm(True, ("<1>",)) and processor.thread_for(False) is None
    assert processor.thread_for(True) is processor.thread
    found = processor.process([SENT], [5])
    assert (found.names, found.items, found.token_ids, len(found.spans)) == ((name_of(SENT),), ("iiiii",), [5], 1)
    with pytest.raises(ValueError, match="messages: image 1: no"):
        processor.process([SENT], [1])
    with pytest.raises(RuntimeError, match=r"the process of images has ended \(3\); send the request again"):
        processor.process([SENT], [0])
    assert processor.process([SENT], [6]).token_ids == [6], "it was started again"


def test_chats_of_a_model_without_a_processor_are_text(child):
    processor = child({"refused": "vLLM has no processor of the model for them"})
    assert processor.form() == ImageForm()
    processor.check(0)
    with pytest.raises(
        ValueError, match="messages: 2 images: vLLM has no processor of the model for them; remove them"
    ):
        processor.process([SENT, SENT], [5])


def test_items_beyond_a_prompt_s_bytes_are_refused(child, monkeypatch):
    processor = child({"form": {}})
    monkeypatch.setattr(image_processor, "MAX_BYTES", 1)
    with pytest.raises(ValueError, match=r"more than [0-9]+ bytes once they are processed; send fewer or smaller ones"):
        processor.process([SENT, SENT], [5])


def test_an_earlier_image_is_asked_for_once_and_a_new_one_only_for_its_place(child, tmp_path, monkeypatch):
    monkeypatch.setattr(image_processor, "REMEMBERED_BYTES", 12)  # of two items
    processor, (one, two, three) = child({"form": {}}), map(SentImage.of, map(url, (1, 2, 3)))

    def asked(*sent: SentImage, placed: int) -> tuple[list[str], list[str]]:
        """Digests of the images that the process got, and of those whose items it gave."""
        found = processor.process(sent, [5], placed)
        assert found.names == tuple(map(name_of, sent)) and len(found.spans) == len(sent) - placed
        last = json.loads((tmp_path / "asked.jsonl").read_text().splitlines()[-1])
        given = [digest for _, digest, _ in last["images"]]
        return given, [digest for digest in given if digest not in last["known"]]

    assert asked(one, placed=0) == ([one.digest], [one.digest])
    assert asked(one, two, placed=1) == ([two.digest], [two.digest])
    assert asked(one, placed=0) == ([one.digest], []), "it has another place, and the same item"
    lines = (tmp_path / "asked.jsonl").read_text()
    assert processor.process([one, two], [7], 2).token_ids == [7]
    assert (tmp_path / "asked.jsonl").read_text() == lines, "nothing was asked"
    asked(three, placed=0)
    assert asked(one, two, placed=2) == ([one.digest], [one.digest]), "the one that was used longest ago was forgotten"


def test_a_gateway_loads_neither_vllm_nor_torch_for_a_model_of_text(tmp_path):
    import subprocess

    code = "import sys, tailrace.app.gateway.images.image_processor, tailrace.app.gateway.chat.chat\n"
    code += "print({name.partition('.')[0] for name in sys.modules} & {'vllm', 'torch', 'PIL', 'transformers'})"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"


def test_base64_of_a_request_is_read_once():
    message = RequestedMessage(**user({"type": "image_url", "image_url": {"url": url(1)}}))
    assert message.images()[0] is message.images()[0] and message.images()[0].content == b"1"
    assert b64encode(message.images()[0].content).decode() in url(1)
