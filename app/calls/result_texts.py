"""Decoders for the texts of results, with the tokenizers of the models that made them.

Invariant: a text is decoded by a tokenizer of exactly the files that the coordinator has: those of this host's model
folder if they are the same, else the coordinator's, sent once. Used by `BatchStreams`.
"""

import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tailrace.deployments.batches.answer_text import text_of
from tailrace.deployments.batches.tokenizer_files import name_of_tokenizer, tokenizer_files
from tailrace.deployments.messages.rollout import GroupResult
from tailrace.deployments.results.later_text import TextRule

if TYPE_CHECKING:
    from tailrace.deployments.batches.prompts import Prompts


class TextDecoder:
    """Decoder of one tokenizer, loaded at the first text. `files`: empty if those in `folder` are the same.

    Decoding raises LookupError if the files do not belong to the tokenizer `name`: the service's files have changed.
    """

    def __init__(self, name: str, folder: str, files: dict[str, bytes]):
        self._name, self._folder, self._files = name, folder, files
        self._lock, self._prompts = threading.Lock(), None

    def __call__(self, token_ids: Sequence[int], rule: TextRule) -> tuple[str, int | str | None]:
        with self._lock:
            if self._prompts is None:
                self._prompts = self._load()
        return text_of(token_ids, rule, self._prompts.decode)

    def _load(self) -> "Prompts":
        from tailrace.deployments.batches.prompts import Prompts  # loads jinja2, which the light base lacks

        if self._files and name_of_tokenizer(self._files) != self._name:
            raise LookupError(f"{self._folder}: its tokenizer is not the one of these tokens any more; no text")
        if not self._files:
            return Prompts(self._folder, 0)
        with TemporaryDirectory(prefix="tailrace-tokenizer-") as folder:
            for name, content in self._files.items():
                Path(folder, Path(name).name).write_bytes(content)
            return Prompts(folder, 0)


class ResultTexts:
    """`ask`: calls the coordinator, by name and arguments."""

    def __init__(self, ask: Callable[..., Awaitable]):
        self._ask = ask
        self._decoders: dict[str, TextDecoder] = {}

    async def attach(self, group: GroupResult) -> None:
        """Gives a decoder to each sample that waits for its text. Asks the coordinator once for each tokenizer."""
        for sample in group.samples:
            if sample.tokenizer:
                sample.decode_by(self._decoders.get(sample.tokenizer) or await self._found(sample.tokenizer))

    async def _found(self, name: str) -> TextDecoder:
        folder, files = await self._ask("model_folder"), {}
        if name_of_tokenizer(tokenizer_files(Path(folder))) != name:
            files = await self._ask("tokenizer_files")
        decoder = self._decoders[name] = TextDecoder(name, folder, files)
        return decoder
