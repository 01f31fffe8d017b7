"""Imports dumped rollouts into the history: prompts get their names, answers their token ids and their places.

Invariant: an answer is kept once, in however many imports its file is read. Answers without an index are numbered, by
prompt and epoch, in the order in which they occur in all files of an import, so a file named twice counts twice.
Called by `tailrace history import`.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from tailrace.app.errors import BadInput
from tailrace.app.files.dumps import Dumped, read_dump
from tailrace.deployments.context.archive import Archive
from tailrace.deployments.context.history import Answer, prompt_key

AT_A_TIME = 512
"""Number of answers written together: a transaction costs as much as many of them."""


class Tokenizer(Protocol):
    """The interface of `deployments.batches.prompts.Prompts`."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def foreign(self, token_ids: list[int]) -> int | None: ...


class HistoryImport:
    """`epoch`, `weights_version`: defaults for answers whose file has none; the epoch, if given, holds for all."""

    def __init__(self, archive: Archive, tokenizer: Tokenizer, epoch: int | None, weights_version: int):
        self._archive, self._tokenizer = archive, tokenizer
        self._epoch, self._weights_version = epoch, weights_version
        self._keys: dict[str, str] = {}  # by prompt text
        self._places: Counter[tuple[str, int]] = Counter()
        self._waiting: dict[tuple[str, str, int], list[Answer]] = {}  # by prompt key, group id, epoch
        self._counts = Counter(files=0, answers=0, tokens=0, skipped=0)
        self._prompts, self._epochs = set(), set()

    def add(self, path: Path, seen: Callable[[int], None]) -> None:
        """Imports a whole file. Raises BadInput at the first bad line; the lines before it are kept."""
        self._counts["files"] += 1
        try:
            for number, answers in read_dump(path, seen):
                for dumped in answers:
                    self._check(dumped, f"{path} line {number}")
                for dumped in answers:
                    self._take(dumped, path.name)
                if sum(map(len, self._waiting.values())) >= AT_A_TIME:
                    self._write()
        finally:
            self._write()

    def summary(self) -> dict[str, int]:
        """Returns counts of the files; `skipped` answers were empty, or known already."""
        counts = {name: self._counts[name] for name in ("files", "answers", "tokens", "skipped")}
        return counts | {"prompts": len(self._prompts), "epochs": len(self._epochs)}

    def _check(self, dumped: Dumped, place: str) -> None:
        """Raises BadInput if a token of the prompt or the answer is not in the model's vocabulary."""
        for name, tokens in (("prompt", dumped.prompt), ("answer", dumped.answer)):
            if not isinstance(tokens, str) and (wrong := self._tokenizer.foreign(tokens)) is not None:
                reason = f"{name}: token {wrong} is not in the model's vocabulary; give --tokenizer of the model"
                raise BadInput(f"{place}: {reason} that made it")

    def _take(self, dumped: Dumped, file_name: str) -> None:
        tokens = self._tokenizer.encode(dumped.answer) if isinstance(dumped.answer, str) else dumped.answer
        key = self._key(dumped.prompt)
        epoch = next(epoch for epoch in (self._epoch, dumped.epoch, 0) if epoch is not None)
        index = dumped.sample_index
        if index is None:
            index = self._places[key, epoch]
            self._places[key, epoch] += 1
        self._prompts.add(key)
        self._epochs.add(epoch)
        self._counts.update(answers=1, tokens=len(tokens))
        if not tokens:
            self._counts["skipped"] += 1
            return
        version = self._weights_version if dumped.weights_version is None else dumped.weights_version
        answer = Answer(index, version, dumped.reward, dumped.finished, np.array(tokens, np.int32))
        self._waiting.setdefault((key, f"{file_name}/{dumped.prompt_id or key}", epoch), []).append(answer)

    def _key(self, prompt: str | list[int]) -> str:
        """Returns the service's key of a prompt, by the text of its token ids."""
        if not isinstance(prompt, str):
            return prompt_key(self._tokenizer.decode(prompt))
        if prompt not in self._keys:
            self._keys[prompt] = prompt_key(self._tokenizer.decode(self._tokenizer.encode(prompt)))
        return self._keys[prompt]

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for (key, group_id, epoch), answers in waiting.items():
            changed = self._archive.of(key).record(key, group_id, epoch, answers)
            if self._archive.problem:
                raise BadInput(self._archive.problem)
            self._counts["skipped"] += len(answers) - changed
