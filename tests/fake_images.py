"""A processor of images without vLLM: a file is a number in text, its mark a token, its placeholder some of these."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from image_model import IMAGE_TOKENS, encoded, item, pixels

from tailrace.app.gateway.images.image_form import ImageForm
from tailrace.app.gateway.images.image_processor import ImageProcessor, ProcessedImages
from tailrace.app.gateway.images.sent_image import SentImage
from tailrace.deployments.features.prompt_features import item_name
from tailrace.deployments.features.wire import PlaceholderSpan

MARK = 77


def url(number: int) -> str:
    """The address of an image."""
    return f"data:image/png;base64,{b64encode(str(number).encode()).decode()}"


def picture(number: int) -> dict:
    """An image as a part of an OpenAI message."""
    return {"type": "image_url", "image_url": {"url": url(number)}}


def flat(messages: Sequence[dict]) -> list[dict]:
    """Messages whose contents are numbers in a row, an image's mark among them."""

    def text(content: str | list[dict]) -> str:
        if isinstance(content, str):  # of a tool
            return content
        return " ".join(str(MARK) if part["type"] == "image" else part["text"] for part in content)

    return [one | {"content": text(one["content"])} for one in messages]


class FakeImages(ImageProcessor):
    """`processed`: numbers of the images of each call; `placed`: how many of them had their places before."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)
        self._form = ImageForm(in_parts=True)
        self._refusal = None
        self.processed: list[list[int]] = []
        self.placed: list[int] = []

    def process(self, sent: Sequence[SentImage], token_ids: Sequence[int] = (), placed: int = 0) -> ProcessedImages:
        self.processed.append([int(one.content) for one in sent])
        self.placed.append(placed)
        items = tuple(encoded(item(pixels(int(one.content)))) for one in sent)
        names = tuple(item_name("image", b64decode(one), b"") for one in items)
        found, spans = [], []
        for token in token_ids:
            if token == MARK:
                spans.append(PlaceholderSpan(offset=len(found), length=IMAGE_TOKENS))
            found += [token] * (IMAGE_TOKENS if token == MARK else 1)
        if len(spans) != len(sent) - placed:
            raise ValueError(f"messages: {len(spans)} marks for {len(sent) - placed} images")
        return ProcessedImages(names, items, found, tuple(spans))
