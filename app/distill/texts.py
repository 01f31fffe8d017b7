"""Training texts of a draft model: prompts with answers in token ids, from files of rollouts.

Invariant: no prompt is both used for training and held out. Reads the files of `app/files/dumps.py`: our rollouts,
traces, verl's and TRL's dumps, JSONL, plain or gzipped. Called by the command; teaching.py reads the texts.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from tailrace.app.errors import BadInput
from tailrace.app.files.dumps import read_dump

HELD_OUT = 0.1
"""Share of the prompts that are held out, one at least."""


class Text(NamedTuple):
    """Token ids of a prompt and its answer; the answer begins at `start`."""

    tokens: tuple[int, ...]
    start: int


class Texts(NamedTuple):
    taught: list[Text]
    held_out: list[Text]


def read_texts(paths: list[Path], encode: Callable[[str], list[int]], tokens: int, longest: int, seed: int) -> Texts:
    """Returns the answers in these files, each cut at `longest` tokens, prompt included, in random order.

    `tokens`: size of the vocabulary. Raises BadInput that names the file if an id is outside it, or if fewer than two
    prompts have an answer.
    """
    by_prompt: dict[tuple[int, ...], list[Text]] = {}
    for path in paths:
        for _, answers in read_dump(path, lambda _read: None):
            for answer in answers:
                prompt, said = (_ids(path, text, encode, tokens) for text in (answer.prompt, answer.answer))
                if said and 0 < len(prompt) < longest:
                    by_prompt.setdefault(prompt, []).append(Text((prompt + said)[:longest], len(prompt)))
    if len(by_prompt) < 2:
        found = f"{len(by_prompt)} prompt(s) with an answer, shorter than {longest} tokens"
        raise BadInput(f"--rollouts {paths[0]}: {found}; two are needed: one is held out")
    chance, prompts = Random(seed), sorted(by_prompt)
    chance.shuffle(prompts)
    held = max(1, round(HELD_OUT * len(prompts)))
    parts = [[text for prompt in part for text in by_prompt[prompt]] for part in (prompts[held:], prompts[:held])]
    for part in parts:
        chance.shuffle(part)
    return Texts(*parts)


def _ids(path: Path, text: str | list[int], encode: Callable[[str], list[int]], tokens: int) -> tuple[int, ...]:
    found = tuple(encode(text) if isinstance(text, str) else text)
    wrong = next((token for token in found if token >= tokens), None)
    if wrong is not None:
        raise BadInput(f"{path}: token {wrong} is not in the model's vocabulary; give rollouts of this model")
    return found
