"""Rows of well-known data sets for reinforcement learning, and the keys of their prompts and answers.

DAPO's rows (and verl's) have messages as `prompt` and `reward_model.ground_truth`; GSM8K's have `question` and an
`answer` that ends in `#### 72`; TRL's have `prompt` as text or messages; MATH's have `problem`. Called by the readers
of prompts and of tasks.
"""

import re
from typing import Any

OURS = ("text", "messages", "token_ids")
PROMPTS = ("prompt", "question", "problem")
ANSWERS = ("answer", "ground_truth", "solution")
EXTRAS = (
    "reward_model", "data_source", "ability", "extra_info", "completion", "split", "level", "subject", "unique_id",
    "agent_name",
)  # fmt: skip
"""Keys of data sets that do not concern a prompt's rollout."""

FINAL = re.compile(r"(?:\A|\n)#### *(?P<number>\S.*?)\s*\Z")
"""The last line of an answer of GSM8K."""


def prompt_of(row: dict[str, Any]) -> tuple[str, Any]:
    """Returns our key for a row's prompt (`text`, `messages`, `token_ids`) and its unchanged value.

    Raises ValueError that names the keys, if there is none, or several.
    """
    given = [key for key in (*OURS, *PROMPTS) if row.get(key) is not None]
    if not given:
        found = f"; the line has {', '.join(list(row)[:6])}" if row else ""
        raise ValueError(f"no prompt: give text, messages or token_ids (prompt and question are taken too){found}")
    if len(given) > 1:
        raise ValueError(f"give exactly one of {', '.join((*OURS, *PROMPTS))} (given: {', '.join(given)})")
    key, value = given[0], row[given[0]]
    if key in OURS:
        return key, value
    if isinstance(value, list):
        return ("messages" if value and isinstance(value[0], dict) else "token_ids"), value
    if not isinstance(value, str):
        raise ValueError(f"{key}: give text, messages or token ids, not {type(value).__name__}")
    return "text", value


def settings_of(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the rest of a row: neither a prompt nor an answer, nor another key that data sets have."""
    return {key: value for key, value in row.items() if key not in (*OURS, *PROMPTS, *ANSWERS, *EXTRAS)}


def answer_of(row: dict[str, Any]) -> Any:
    """Returns a row's answer, or None without one. For GSM8K it is the number after `####`, without commas."""
    answer = next((row[key] for key in ANSWERS if row.get(key) is not None), None)
    if answer is None and isinstance(row.get("reward_model"), dict):
        answer = row["reward_model"].get("ground_truth")
    final = FINAL.search(answer) if isinstance(answer, str) else None
    return answer if final is None else final["number"].replace(",", "")
