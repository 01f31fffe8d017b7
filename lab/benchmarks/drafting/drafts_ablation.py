"""What each part of the draft index brings: tokens per verification with the part, divided by those without it.

The window of history is measured under an artificial drift. Each epoch has two answers; over the epochs more of them
come from the last checkpoint and fewer from the one before. Called by `bench drafts --ablation`.
"""

from collections.abc import Callable

from tailrace.deployments.draft_index.scorer import CandidateScorer
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.messages.context import PastAnswer
from tailrace.lab.benchmarks.drafting.drafts import MOST_HISTORY, RecordedRollouts, Setting, replay

WINDOWS = (1, 2, 4, 8, 16)
ANSWERS_AN_EPOCH = 2
BOTH = Setting(7, MOST_HISTORY)


def measure(rollouts: list[RecordedRollouts], say: Callable[[str], None]) -> dict:
    """Returns ratios of tokens per verification. Drafts use the mates and history of `history_16_mates_7`; for
    `window_N` they use history alone, and ratios are to a window of one epoch.
    """
    whole = replay(rollouts, BOTH).tokens_per_step
    say(f"all of it: {whole:.3f} tokens per step")
    ratios = {}
    for name, without in {
        "group_context": IndexSettings(group_context=False),
        "history": IndexSettings(history=False),
        "learning": IndexSettings(learning=False),
        "reward_weight": IndexSettings(reward_weight=0),
    }.items():
        ratios[name] = whole / replay(rollouts, BOTH, CandidateScorer(without)).tokens_per_step
        say(f"{name}: {ratios[name]:.3f}")
    windows = {}
    for epochs in WINDOWS:
        drifted = [prompt._replace(mates=[], history=drift(prompt, epochs)) for prompt in rollouts]
        setting = Setting(history=ANSWERS_AN_EPOCH * epochs)
        windows[f"window_{epochs}"] = replay(drifted, setting).tokens_per_step
        say(f"a window of {epochs} epochs: {windows[f'window_{epochs}']:.3f} tokens per step")
    ratios |= {name: value / windows["window_1"] for name, value in windows.items()}
    return {"tokens_per_step": round(whole, 3), "ratios": {name: round(value, 3) for name, value in ratios.items()}}


def drift(prompt: RecordedRollouts, window: int) -> list[PastAnswer]:
    """Returns the answers of the last `window` of 16 epochs, newest first. Over the epochs they drift from the earlier
    checkpoint to the last one.
    """
    old, new = [answer.tokens for answer in prompt.history], list(prompt.mates)
    epochs, answers = WINDOWS[-1], []
    for number in range(epochs * ANSWERS_AN_EPOCH):
        epoch = number // ANSWERS_AN_EPOCH
        source = new if number * 7 % epochs < epoch and new else old or new  # 7 spreads the new ones
        if not source:
            break
        if epoch >= epochs - window:
            answers.append(PastAnswer("", epoch, 0, None, source[number % len(source)]))
    return answers[::-1]
