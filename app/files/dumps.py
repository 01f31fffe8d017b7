"""Dumped rollouts of several tools, JSONL, plain or gzipped: the answers of each line.

verl's rollout dumps (`trainer.rollout_data_dir`: input, output, score, step), TRL's completions as JSONL (step, prompt,
completion, rewards; a row a line, or a step's columns), our own results, and traces to replay. Errors are BadInput and
name file and line; earlier lines have been yielded already. Called by app/files/history_import.py.
"""

import gzip
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from tailrace.app.config import first_error
from tailrace.app.errors import BadInput
from tailrace.app.strict_json import parse_object
from tailrace.deployments.messages.rollout import Segment
from tailrace.policies.protocol.actions import SampleEnd

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""An integer that fits into a database."""

Tokens = list[Annotated[int, Field(ge=0, lt=2**31)]]


class Dumped(NamedTuple):
    """One answer. Prompt and answer are text or token ids. None: absent in the file."""

    prompt: str | Tokens
    answer: str | Tokens
    prompt_id: str | None = None
    sample_index: int | None = None
    epoch: int | None = None
    weights_version: int | None = None
    reward: float | None = None
    finished: bool = True


class VerlLine(BaseModel):
    input: str
    output: str
    score: float | None = None
    step: Count | None = None

    def answers(self) -> Iterator[Dumped]:
        yield Dumped(self.input, self.output, epoch=self.step, reward=told(self.score))


class TrlRow(BaseModel):
    """`rewards`: the columns with `reward` in their name; TRL names them after its reward functions."""

    prompt: str
    completion: str
    step: Count | None = None
    rewards: dict[str, float | None]

    def answers(self) -> Iterator[Dumped]:
        known = [value for value in map(told, self.rewards.values()) if value is not None]
        reward = told(self.rewards.get("reward", sum(known) if known else None))
        yield Dumped(self.prompt, self.completion, epoch=self.step, reward=reward)


class OurSample(BaseModel):
    sample_index: Count
    token_ids: Tokens
    finish_reason: SampleEnd
    segments: list[Segment] = []


class OurLine(BaseModel):
    prompt_id: str
    prompt_token_ids: Tokens
    samples: list[OurSample]
    step: Count | None = None

    def answers(self) -> Iterator[Dumped]:
        for sample in self.samples:
            version = sample.segments[-1].weights_version if sample.segments else None
            whole = sample.finish_reason == SampleEnd.STOP
            place = (self.prompt_id, sample.sample_index, self.step, version)
            yield Dumped(self.prompt_token_ids, sample.token_ids, *place, finished=whole)


class TraceSample(BaseModel):
    text: str
    reward: float | None = None


class TraceEpoch(BaseModel):
    policy_step: Count
    samples: list[TraceSample]


class TraceLine(BaseModel):
    prompt_id: Annotated[str, Field(min_length=1)] | int
    prompt: str
    epochs: list[TraceEpoch]

    def answers(self) -> Iterator[Dumped]:
        for epoch in self.epochs:
            for index, sample in enumerate(epoch.samples):
                place = (str(self.prompt_id), index, epoch.policy_step)
                yield Dumped(self.prompt, sample.text, *place, reward=told(sample.reward))


def told(reward: float | None) -> float | None:
    """Returns the reward, or None if it is not finite: dumps write NaN if a reward function did not apply."""
    return None if reward is None or not math.isfinite(reward) else reward


def read_dump(path: Path, seen: Callable[[int], None]) -> Iterator[tuple[int, list[Dumped]]]:
    """Yields the number, from 1, and the answers of each line. `seen`: called with the number of bytes read so far."""
    number = 0
    try:
        with open(path, "rb") as raw:
            lines = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            for line in lines:
                number += 1
                if line.strip():
                    yield number, _parse(line)
                seen(raw.tell())
    except (ValueError, ValidationError) as error:
        problem = first_error(error) if isinstance(error, ValidationError) else str(error)
        raise BadInput(f"{path} line {number}: {problem}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def _parse(line: bytes) -> list[Dumped]:
    """Returns the answers of a line. Raises ValueError, or ValidationError, that names the fault."""
    item = parse_object(line, constants=True)
    if "prompt_token_ids" in item:
        return list(OurLine.model_validate(item).answers())
    if "epochs" in item:
        return list(TraceLine.model_validate(item).answers())
    if "input" in item and "output" in item:
        return list(VerlLine.model_validate(item).answers())
    if "prompt" in item and "completion" in item:
        if chat := next((key for key in ("prompt", "completion") if _is_chat(item[key])), None):
            raise ValueError(
                f"{chat}: chats are not taken; give text, the prompt as the model's chat template renders it"
            )
        rows = _rows(item) if isinstance(item["prompt"], list) else [item]
        return [answer for row in rows for answer in _trl_row(row).answers()]
    raise ValueError(
        "no rollout that is known here: verl's have input and output, TRL's prompt and completion, ours "
        "prompt_token_ids and samples, traces prompt and epochs"
    )


def _is_chat(value: Any) -> bool:
    """Returns whether the value is messages, or a column of them."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, dict)


def _rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a step's columns as rows; a value that is no list applies to every row."""
    count = len(columns["prompt"])
    wrong = next((name for name, of in columns.items() if isinstance(of, list) and len(of) != count), None)
    if wrong is not None:
        raise ValueError(f"{wrong}: has {len(columns[wrong])} values for {count} prompts")
    return [{name: of[place] if isinstance(of, list) else of for name, of in columns.items()} for place in range(count)]


def _trl_row(row: dict[str, Any]) -> TrlRow:
    rewards = {name: value for name, value in row.items() if "reward" in name}
    return TrlRow.model_validate(
        {name: row.get(name) for name in ("prompt", "completion", "step")} | {"rewards": rewards}
    )
