"""Reward functions of a user, as `task.reward` names them."""

import os
import time

FINE = 0.5


def length(prompt, completion, answer):
    return len(completion)


def broken(prompt, completion, answer):
    raise ValueError("broken")


def trouble(prompt, completion, answer):
    if completion == "raise":
        raise RuntimeError("first line\nno such tool")
    if completion == "hang":
        time.sleep(600)
    if completion == "exit":
        os._exit(7)
    return {"nan": float("nan"), "text": "high" * 1000, "true": True}.get(completion, FINE)


def same_for_some(prompt, completion, answer):
    """Of a question with an even answer, all answers are as good."""
    return 1.0 if int(answer) % 2 == 0 else len(completion)
