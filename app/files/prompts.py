"""Prompts from a JSONL file: one `PromptGroup` a line. Errors are BadInput and name file, line and key."""

import json
from pathlib import Path

from pydantic import ValidationError

from tailrace.app.config import first_error
from tailrace.app.errors import BadInput
from tailrace.deployments.messages.rollout import PromptGroup


def read_prompts(path: Path, defaults: dict) -> list[PromptGroup]:
    """Every prompt of the file. `defaults` (samples, max_tokens, sampling) hold where a line does not say.

    A line without `prompt_id` is called after its number. Raises BadInput on the first bad line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    prompts, seen = [], {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(path, number, line, defaults)
        if prompt.prompt_id in seen:
            raise BadInput(
                f"{path} line {number}: prompt_id {prompt.prompt_id!r} is on line {seen[prompt.prompt_id]} already"
            )
        seen[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise BadInput(f"{path}: holds no prompt; give one JSON object a line, such as " + '{"text": "..."}')
    return prompts


def _parse(path: Path, number: int, line: str, defaults: dict) -> PromptGroup:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path} line {number}: not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(data, dict):
        raise BadInput(f"{path} line {number}: a JSON object is needed, not {type(data).__name__}")
    try:
        return PromptGroup.model_validate({"prompt_id": f"line-{number}", **defaults, **data})
    except ValidationError as error:
        raise BadInput(f"{path} line {number}: {first_error(error, PromptGroup).removeprefix('file: ')}") from error
