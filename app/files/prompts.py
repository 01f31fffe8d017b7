"""Prompts from a JSONL file: one `PromptGroup` a line, or a row of a well-known data set (`data_rows.py`).

Errors are BadInput and name file, line and key.
"""

from pathlib import Path

from pydantic import ValidationError

from tailrace.app.config import first_error
from tailrace.app.errors import BadInput
from tailrace.app.files.data_rows import prompt_of, settings_of
from tailrace.app.strict_json import parse_object
from tailrace.deployments.messages.rollout import PromptGroup


def read_prompts(path: Path, defaults: dict) -> list[PromptGroup]:
    """Reads every prompt of the file. `defaults` (samples, max_tokens, sampling) apply to lines without these keys.

    A line without `prompt_id` is named by its number. Raises BadInput on the first bad line.
    """
    try:
        lines = path.read_bytes().split(b"\n")  # `splitlines` also cuts at characters that JSON permits in strings
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
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


def _parse(path: Path, number: int, line: bytes, defaults: dict) -> PromptGroup:
    try:
        row = parse_object(line)
        key, value = prompt_of(row)
        data = settings_of(row) | {key: value}
        return PromptGroup.model_validate({"prompt_id": f"line-{number}", **defaults, **data})
    except ValidationError as error:
        raise BadInput(f"{path} line {number}: {first_error(error, PromptGroup).removeprefix('file: ')}") from error
    except ValueError as error:
        raise BadInput(f"{path} line {number}: {error}") from error
