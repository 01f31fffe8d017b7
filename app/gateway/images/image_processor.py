"""vLLM's processor of the model's images, in a process of its own: a gateway loads neither vLLM nor Pillow for them.

Owns that process, which starts with the first chat of a model that takes images (10 s, 760 MB), and the thread that
waits for it. Invariant: an image's features are a function of its file and of the model's folder alone.
"""

import json
import subprocess
import sys
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from cachetools import LRUCache

from tailrace.app.gateway.images.image_form import ImageForm
from tailrace.app.gateway.images.sent_image import TOO_LARGE, SentImage
from tailrace.deployments.features.wire import MAX_BYTES, MAX_ITEMS, PlaceholderSpan

MODULE = "tailrace.app.gateway.images.processing"

REMEMBERED_BYTES = 1 << 30
"""Maximum size of the items that a gateway remembers: four times what those of one prompt may have."""


class ProcessedItem(NamedTuple):
    """`name`: of the item, as PromptFeatures names it. `data`: vLLM's msgpack in base64."""

    name: str
    data: str


class ProcessedImages(NamedTuple):
    """`names`: of the images' processed content, as PromptFeatures names items. `items`: vLLM's msgpack in base64.
    `token_ids`: the end of a prompt, with the images' placeholders at `spans`.
    """

    names: tuple[str, ...]
    items: tuple[str, ...]
    token_ids: list[int]
    spans: tuple[PlaceholderSpan, ...]


class ImageProcessor:
    """`folder`: the model's. `thread`: where `form` and `process` are called, one call at a time."""

    def __init__(self, folder: str):
        self.thread = ThreadPoolExecutor(1, "images")
        self._folder = folder
        self._process: subprocess.Popen | None = None
        self._items: LRUCache[str, ProcessedItem] = LRUCache(REMEMBERED_BYTES, lambda item: len(item.data))
        self._form: ImageForm | None = None
        self._refusal: str | None = None

    def thread_for(self, has_images: bool) -> ThreadPoolExecutor | None:
        """Returns the thread for a chat, or None for any: this one's calls wait for each other."""
        return None if self._form is not None and not has_images else self.thread

    def form(self) -> ImageForm:
        """Returns the form of all chats; that of texts if the model's processor cannot be loaded."""
        if self._form is None:
            self._start()
        return self._form

    def check(self, count: int) -> None:
        """Raises ValueError, one line, if a prompt cannot have so many images."""
        if count > MAX_ITEMS:
            raise ValueError(f"messages: {count} images; a prompt has at most {MAX_ITEMS}, so leave some out")
        self.form()
        if count and self._refusal is not None:
            raise ValueError(f"messages: {count} images: {self._refusal}; remove them")

    def process(self, sent: Sequence[SentImage], token_ids: Sequence[int] = (), placed: int = 0) -> ProcessedImages:
        """Processes images, of which all but the first `placed` have their marks in `token_ids`. Raises ValueError, one
        line, for an image that the model does not take, and RuntimeError if the process has ended.
        """
        self.check(len(sent))
        found = {one.digest: item for one in sent if (item := self._items.get(one.digest)) is not None}
        asked = [
            [number, one.digest, b64encode(one.content).decode()]
            for number, one in enumerate(sent, 1)
            if number > placed or one.digest not in found
        ]
        answer = {"items": {}, "token_ids": list(token_ids), "spans": ()}
        if asked:
            new = [one.digest for one in sent[placed:]]
            question = {"images": asked, "token_ids": list(token_ids), "new": new, "known": list(found)}
            answer = self._ask(question)
        if "refused" in answer:
            raise ValueError(f"messages: {answer['refused']}")
        found |= {digest: ProcessedItem(*item) for digest, item in answer["items"].items()}
        items = [found[one.digest] for one in sent]
        if sum(len(item.data) for item in items) > MAX_BYTES:
            raise ValueError(f"messages: {TOO_LARGE}")
        self._items.update(found)
        spans = tuple(PlaceholderSpan(offset=offset, length=length) for offset, length in answer["spans"])
        names, data = tuple(item.name for item in items), tuple(item.data for item in items)
        return ProcessedImages(names, data, answer["token_ids"], spans)

    def _start(self) -> None:
        command = [sys.executable, "-m", MODULE, self._folder]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        found = self._answer()
        self._refusal = found.get("refused")
        form = found.get("form", {})
        self._form = ImageForm(**form | {"marks": tuple(form.get("marks", ()))})

    def _ask(self, question: dict) -> dict:
        if self._process.poll() is not None:
            self._start()
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, and gives no answer
        return self._answer()

    def _answer(self) -> dict:
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise RuntimeError(f"the process of images has ended ({self._process.wait()}); send the request again")

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()  # it ends with its input
            self._process.wait()
            self._process.stdout.close()
        self.thread.shutdown()
