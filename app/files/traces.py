"""Real rollouts to replay: JSONL, one prompt a line with the samples of one or more checkpoints ("epochs").

`{prompt_id, prompt, answer, epochs: [{policy_step, samples: [{text, reward}]}]}`, plain or gzipped. The engine computes
every step of a replay for real; the trace decides the tokens. Errors are BadInput and name file and line.
"""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from tailrace.app.config import first_error
from tailrace.app.errors import BadInput
from tailrace.app.files.dumps import TraceLine
from tailrace.app.strict_json import parse_object
from tailrace.deployments.messages.rollout import PromptGroup


def read_trace(path: Path) -> list[dict]:
    """Returns the lines of a trace, each with `prompt_id`, `prompt` and `epochs`."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    lines, seen = [], {}
    for number, line in enumerate(text.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            item = parse_object(line, constants=True)
            found = TraceLine.model_validate(item)
            if not found.prompt:
                raise ValueError("prompt: it is empty; a prompt needs one token or more")
            if not found.epochs:
                raise ValueError("epochs: it is empty; give the samples of one or more")
            if not found.epochs[-1].samples:
                raise ValueError("epochs: the last one has no sample to roll out; leave the prompt out")
            if (name := str(found.prompt_id)) in seen:
                raise ValueError(f"prompt_id {name!r} is on line {seen[name]} already")
            seen[name] = number
        except ValidationError as error:
            raise BadInput(f"{path} line {number}: not a trace line: {first_error(error, TraceLine)}") from error
        except ValueError as error:
            raise BadInput(f"{path} line {number}: not a trace line: {error}") from error
        lines.append({key: item[key] for key in ("prompt_id", "prompt", "epochs")})
    if not lines:
        raise BadInput(f"{path}: holds no prompt")
    return lines


def replay_groups(
    lines: list[dict], encode: Callable[[str], list[int]], *, prompts: int, samples: int, max_tokens: int
) -> tuple[PromptGroup, ...]:
    """Returns the first `prompts` lines as groups that replay `samples` of the last checkpoint's, at most `max_tokens`
    each.

    `max_tokens` is the same for all, as in a real step: no group reveals how long its samples are (law 3).
    """
    groups = []
    for line in lines[:prompts]:
        texts = [sample["text"] for sample in line["epochs"][-1]["samples"][:samples]]
        forced = tuple(tuple(encode(text)[: max_tokens - 1]) for text in texts)
        groups.append(
            PromptGroup(
                prompt_id=str(line["prompt_id"]),
                token_ids=tuple(encode(line["prompt"])),
                samples=len(forced),
                max_tokens=max_tokens,
                forced_token_ids=forced,
            )
        )
    return tuple(groups)
