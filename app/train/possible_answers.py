"""Checks whether a completion can have an answer at all, by the pattern of a task: rewards that are always 0 teach
nothing, and are refused before a service starts.

An answer is possible unless the pattern certainly never gives it. Patterns with lookaround are not judged.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec

from tailrace.app.errors import BadInput
from tailrace.app.train.task import Question, Task, TaskConfig

LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!]|P=|\()|\\[1-9bB]")
"""Lookahead and lookbehind, references to groups, conditions, and word boundaries."""


def check_rewards(config: TaskConfig, task: Task) -> str | None:
    """Returns a warning if some answers can never be given, or None. Raises BadInput if none can be."""
    questions = [*task.train, *task.held_out]
    if config.reward != "task":
        _check_function(config.reward)
        return None
    if config.prompts is None:
        return None
    wrong = [question for question in questions if not is_possible(question.answer or "", config.answer_pattern)]
    if len(wrong) == len(questions):
        raise BadInput(
            f"task.answer_pattern: {config.answer_pattern!r} never gives an answer such as {wrong[0].answer!r}, so all "
            f"rewards would be 0; {_mend(config.answer_pattern)}"
        )
    return _warning(wrong, len(questions)) if wrong else None


def _check_function(path: str) -> None:
    """Raises BadInput if a path cannot be that of a function. Imports nothing: torch comes after Ray."""
    package = re.split("[.:]", path)[0]
    if ":" not in path or not path.partition(":")[2] or not package.isidentifier():
        raise BadInput(f"task.reward: {path} is no function; write package.module:function")
    if find_spec(package) is None:
        raise BadInput(f"task.reward: {path}: there is no package {package}; is its folder in PYTHONPATH?")


def is_possible(answer: str, pattern: str | None) -> bool:
    """Returns whether a completion can have this answer."""
    if pattern is None:
        return answer == answer.strip()
    part = group_1(pattern) or pattern
    if LOOKS_AROUND.search(part):
        return True
    try:
        return re.fullmatch(part, answer, _flags(pattern)) is not None
    except re.error:  # a part that says nothing on its own
        return True


def group_1(pattern: str) -> str | None:
    """Returns the text of a pattern's first group, or None without one."""
    depth, begin, in_set, place = 0, None, False, 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 2
            continue
        if in_set:
            in_set = character != "]"
        elif character == "[":
            in_set = True
            place += pattern[place + 1 : place + 2] == "^"
            place += pattern[place + 1 : place + 2] == "]"  # a bracket that comes first is one of the set
        elif character == "(":
            named = re.compile(r"\(\?P<\w+>").match(pattern, place)
            if begin is None and (named or pattern[place + 1 : place + 2] != "?"):
                begin, base = (named.end() if named else place + 1), depth
            depth += 1
        elif character == ")":
            depth -= 1
            if begin is not None and depth == base:
                return pattern[begin:place]
        place += 1
    return None


def _flags(pattern: str) -> int:
    return re.compile(pattern).flags & ~re.DEBUG


def _mend(pattern: str | None) -> str:
    if pattern is None:
        return "remove white space around the answers"
    return "let its group 1, or the whole of it, match the answers as the file has them"


def _warning(wrong: Sequence[Question], count: int) -> str:
    return (
        f"task: {len(wrong)} of {count} answers are never given by task.answer_pattern, such as {wrong[0].answer!r}: "
        "their rewards will be 0"
    )
