"""A task: questions with answers that can be checked, for training and held out.

From `reasoning-gym` by name, or from a JSONL file. Invariant: no held-out question is in the training set, by its text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from tailrace.app.deployment_settings import StrictModel
from tailrace.app.errors import BadInput
from tailrace.app.files.data_rows import answer_of, prompt_of, settings_of
from tailrace.app.strict_json import parse_object


class TaskConfig(StrictModel):
    """Exactly one of `name` and `prompts` is given."""

    name: str | None = Field(None, description="a data set of reasoning-gym, such as chain_sum")
    options: dict[str, Any] = Field(default_factory=dict, description="its settings, such as max_terms")
    prompts: Path | None = Field(
        None,
        description='JSONL: "prompt" (text or chat messages) and "answer", or rows of GSM8K, DAPO, MATH',
    )
    instruction: str | None = Field(None, description="text after each question")
    chat: bool = Field(True, description="use the model's chat template; false: the bare text")
    answer_pattern: str | None = Field(
        None,
        description="regular expression; its last match in a completion is the answer, by its group 1 if it has one",
    )
    reward: str = Field("task", description="task, or package.module:function(prompt, completion, answer) -> number")
    train: int = Field(1000, ge=1, description="questions to train on")
    held_out: int = Field(100, ge=0, description="questions for accuracy alone")
    seed: int = Field(0, ge=0)

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _one_source(self):
        if (self.name is None) == (self.prompts is None):
            raise ValueError("give exactly one of name (a data set of reasoning-gym) and prompts (a JSONL file)")
        if self.options and self.name is None:
            raise ValueError("options are those of a data set of reasoning-gym; with prompts there are none")
        return self


@dataclass(frozen=True)
class Question:
    """`prompt`: text or chat messages. `entry`: the item of reasoning-gym that scores an answer, if there is one."""

    question_id: str
    prompt: str | list[dict[str, str]]
    answer: str | None
    entry: dict | None = None


@dataclass(frozen=True)
class Task:
    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


def read_task(config: TaskConfig) -> Task:
    """Reads the questions of a task. Raises BadInput, one line, if there are too few or the source is not usable."""
    texts = _of_reasoning_gym(config) if config.name is not None else _of_file(config)
    questions, seen = [], set()
    wanted = config.train + config.held_out
    for text, answer, entry in texts:
        question = _question(config, text, answer, entry)
        if question.question_id not in seen:
            seen.add(question.question_id)
            questions.append(question)
        if len(questions) == wanted:
            break
    source = f"reasoning-gym's {config.name}" if config.name is not None else str(config.prompts)
    if len(questions) <= config.held_out:
        raise BadInput(
            f"task: {source} has {len(questions)} different questions, and {config.held_out} are to be held out; "
            "give a smaller held_out, or other options"
        )
    return Task(tuple(questions[config.held_out :]), tuple(questions[: config.held_out]))


def _question(config: TaskConfig, text: str | list, answer: str | None, entry: dict | None) -> Question:
    messages = [dict(each) for each in text] if isinstance(text, list) else [{"role": "user", "content": text}]
    if config.instruction:
        messages[-1]["content"] += config.instruction
    prompt = messages if config.chat else messages[-1]["content"]
    digest = blake2b(repr(prompt).encode(), digest_size=8, person=b"tailrace-quest").hexdigest()
    return Question(digest, prompt, answer, entry)


ROUNDS = 4
"""Multiple of the wanted number of items that are drawn to find different questions: small data sets repeat
themselves.
"""


def _of_reasoning_gym(config: TaskConfig) -> Iterable[tuple[str, str | None, dict]]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS:
        near = get_close_matches(config.name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(DATASETS)}, such as chain_sum and gcd"
        raise BadInput(f"task.name: reasoning-gym has no data set {config.name!r}; {hint}")
    size = ROUNDS * (config.train + config.held_out)
    try:
        items = reasoning_gym.create_dataset(config.name, size=size, seed=config.seed, **config.options)
    except (TypeError, ValueError, AssertionError) as error:
        raise BadInput(f"task.options: {config.name} does not take them: {' '.join(str(error).split())}") from error
    return ((item["question"], item["answer"], dict(item)) for item in items)


def _of_file(config: TaskConfig) -> Iterable[tuple[str | list, str | None, None]]:
    path, answered = config.prompts, config.reward == "task"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found = _of_line(line, answered)
                if not config.chat and isinstance(found[0], list) and len(found[0]) > 1:
                    raise ValueError("prompt: several messages need the chat template; task.chat: false takes text")
                yield found
            except ValueError as error:
                raise BadInput(f"{path} line {number}: {error}") from error


def _of_line(line: bytes, answered: bool) -> tuple[str | list, str | None, None]:
    """Returns the prompt and the answer of a line. `answered`: rewards need an answer. Raises ValueError."""
    row = parse_object(line)
    key, prompt = prompt_of(row)
    if unknown := sorted(settings_of(row)):
        raise ValueError(f"{unknown[0]}: unknown key; a line has prompt and answer")
    if not (key == "text" and isinstance(prompt, str) and prompt.strip()) and not _is_chat(prompt):
        raise ValueError("prompt: give text, or messages with role and content")
    answer = answer_of(row)
    if answered and (answer is None or answer == ""):
        raise ValueError("answer: there is none, so its reward would always be 0; give one, or another task.reward")
    if answered and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        raise ValueError(f"answer: text or a number is needed, not {type(answer).__name__}")
    return prompt, None if answer is None else str(answer), None


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and each.keys() == {"role", "content"} for each in value)
        and all(isinstance(part, str) for each in value for part in each.values())
    )
