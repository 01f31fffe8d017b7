"""The process of `ImageProcessor`: opens images' files, and has vLLM 0.32's processor of the model make their features.

Invariant: each image is processed by itself, whatever else its prompt has. A file is decoded after its size in pixels
is known. Source: `renderers/base.py`, `entrypoints/scale_out/token_in_token_out`.
"""

import contextlib
import json
import os
import sys
from base64 import b64decode
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image

from tailrace.app.gateway.images.sent_image import KINDS, TOO_LARGE
from tailrace.deployments.features.prompt_features import item_name
from tailrace.deployments.features.wire import MAX_BYTES, MAX_ITEMS

MAX_PIXELS = Image.MAX_IMAGE_PIXELS
"""Maximum pixels of an image: Pillow's limit for files that unpack to much more than their bytes, 89 million."""

CACHE_GB = 0.5
"""Memory for processed images, in GiB: more than those of one prompt may have, which are placed once all are processed.
The gateway's `ImageProcessor` remembers those of earlier turns."""

MAX_CHARACTERS = 300
"""Maximum number of characters of a reason."""


class ModelImages:
    """`config`: vLLM's ModelConfig."""

    def __init__(self, config: Any):
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.multimodal.cache import MultiModalProcessorOnlyCache

        self._config, self._processor = config, MULTIMODAL_REGISTRY.create_processor(config)
        self._cache = MultiModalProcessorOnlyCache(config)

    @classmethod
    def of_folder(cls, folder: str) -> "ModelImages":
        """Raises ValueError in a few words if the model takes no images."""
        from vllm.engine.arg_utils import EngineArgs

        from tailrace.deployments.vllm_exact.requests import features_unfit

        arguments = EngineArgs(model=folder, dtype="float32", mm_processor_cache_gb=CACHE_GB)  # encoders cast it
        config = arguments.create_model_config()
        if (reason := features_unfit(config)) is not None:
            raise ValueError(reason)
        found = cls(config)
        if "image" not in found._processor.info.allowed_mm_limits:
            raise ValueError("the model takes no images by themselves")
        return found

    def form(self) -> dict:
        """Returns the fields of ImageForm."""
        from vllm.renderers.hf import resolve_chat_template, resolve_chat_template_content_format

        tokenizer, same = self._processor.info.get_tokenizer(), {"model_config": self._config}
        form = resolve_chat_template_content_format(None, None, "auto", tokenizer, **same)
        own = getattr(tokenizer, "chat_template", None)
        template = None if own else resolve_chat_template(tokenizer, None, None, **same)
        marks = [self._mark(number) for number in range(1, MAX_ITEMS + 1)]
        return {"in_parts": form == "openai", "marks": marks, "chat_template": template}

    def _mark(self, number: int) -> str:
        from vllm.model_executor.model_loader import get_model_cls

        return get_model_cls(self._config).get_placeholder_str("image", number) or ""

    def answer(
        self, images: Sequence[tuple[int, str, str]], token_ids: list[int], new: list[str], known: list[str]
    ) -> dict:
        """Returns `token_ids` and `spans` of ProcessedImages, and the `items` of images that are not `known`, name and
        data by digest. `images`: number in the prompt, digest and file of each, the latter in base64. `new`: digests of
        those that have their marks in `token_ids`. Raises ValueError, one line.
        """
        from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item

        items: dict[str, tuple[str, str]] = {}
        for number, digest, text in images:
            if not self._cache.is_cached_item(digest):
                try:
                    self._apply(self._dummy(), [opened(b64decode(text))], [digest])
                except Exception as error:  # of Pillow and of the model's processor: the file's fault
                    raise ValueError(f"image {number}: {said(error)}") from error
            if digest not in items and digest not in known:
                data = encode_mm_kwargs_item(self._item(digest))
                items[digest] = item_name("image", b64decode(data), b""), data
            if sum(len(data) for _, data in items.values()) > MAX_BYTES:
                raise ValueError(TOO_LARGE)
        if not new:
            return {"items": items, "token_ids": token_ids, "spans": []}
        try:
            prompt = self._apply(token_ids, [None] * len(new), new)
        except Exception as error:  # the text has not a mark for each image
            raise ValueError(f"the chat template has no place for each of the images: {said(error)}") from error
        spans = [span_of(one) for one in prompt["mm_placeholders"]["image"]]
        return {"items": items, "token_ids": prompt["prompt_token_ids"], "spans": spans}

    def _item(self, digest: str) -> Any:
        """Returns a processed image with its fields sorted: vLLM's order is a set's, another one in each process."""
        item, _ = self._cache.get_and_update_item(None, digest)
        return type(item)(sorted(item.items()))

    def _apply(self, token_ids: list[int], images: list, digests: list[str]) -> Any:
        from vllm.multimodal.processing.context import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs

        items = self._processor.info.parse_mm_data({"image": images})
        inputs = ProcessorInputs(token_ids, items, {"image": digests}, cache=self._cache)
        return self._processor.apply(inputs, TimingContext(enabled=False))

    def _dummy(self) -> list[int]:
        """Returns a prompt of one image alone."""
        text = self._processor.dummy_inputs.get_dummy_text({"image": 1})
        return self._processor.info.get_tokenizer().encode(text, add_special_tokens=False)


def opened(content: bytes) -> Any:
    """Returns the image of a file as vLLM loads it. Raises ValueError, or what Pillow raises."""
    try:
        with Image.open(BytesIO(content), formats=KINDS) as image:  # reads the head alone
            width, height = image.size
    except Image.UnidentifiedImageError:
        raise ValueError(f"its file is none of {', '.join(KINDS)}") from None
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels; send at most {MAX_PIXELS}")
    from vllm.multimodal.media.image import ImageMediaIO

    return ImageMediaIO().load_bytes(content)


def span_of(found: Any) -> tuple[int, int]:
    """Returns offset and length of the tokens whose embeddings come from an image. `found`: vLLM's PlaceholderRange.
    Raises ValueError if other tokens are among them.
    """
    if found.is_embed is None:
        return found.offset, found.length
    places = [place for place, is_embed in enumerate(found.is_embed.tolist()) if is_embed]
    if not places or places[-1] - places[0] + 1 != len(places):
        raise ValueError("the model puts other tokens among those of an image, which engines here do not take")
    return found.offset + places[0], len(places)


def said(error: Exception) -> str:
    """Returns an error in one line."""
    return " ".join(str(error).split())[:MAX_CHARACTERS] or type(error).__name__


def main(folder: str) -> None:
    """Writes the form, then answers each line of input with a line of JSON, until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # vLLM's log goes to standard output
    images, first = None, {}
    try:
        images = ModelImages.of_folder(folder)
        first["form"] = images.form()
    except Exception as error:  # noqa: BLE001 - a model of text alone, or one that vLLM has no processor of
        first = {"refused": f"vLLM has no processor of the model for them: {said(error)}"}
    _write(answers, first)
    for line in sys.stdin.buffer:
        try:
            _write(answers, images.answer(**json.loads(line)))
        except ValueError as error:
            _write(answers, {"refused": said(error)})


def _write(answers: Any, value: dict) -> None:
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main(sys.argv[1])
