"""The tokens of recorded rollouts, group by group: those of a trace, or of a batch that replays them.

Invariant: each answer has the length that the engine gives it, with its end-of-sequence token. Used by the simulator's
replays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tailrace.app.errors import BadInput
from tailrace.deployments.messages.context import PastAnswer
from tailrace.deployments.messages.rollout import PromptGroup

END_TOKEN = 1 << 24
"""End token of an answer that ends by itself: beyond every vocabulary, and the same in all answers."""


class Recorded(NamedTuple):
    """One group's tokens, int32: its prompt, each sample's whole answer, and earlier answers, newest epoch last."""

    prompt: np.ndarray
    answers: Sequence[np.ndarray]
    history: Sequence[PastAnswer] = ()

    @property
    def epoch(self) -> int:
        return 1 + max((answer.epoch for answer in self.history), default=-1)


def forced(groups: Sequence[PromptGroup], batch_id: str) -> dict[str, Recorded]:
    """Returns recorded answers of a batch's groups, by group id, each answer with its end; without history."""
    return {
        f"{batch_id}/{group.prompt_id}": Recorded(
            np.array(group.token_ids, np.int32),
            [np.array([*tokens, END_TOKEN], np.int32) for tokens in group.forced_token_ids],
        )
        for group in groups
    }


def of_trace(
    lines: Sequence[Mapping], encode: Callable[[str], list[int]], samples: int, max_tokens: int
) -> dict[str, Recorded]:
    """Returns each prompt's tokens: at most `samples` answers of each checkpoint, each of at most `max_tokens` with its
    end. Raises BadInput for a prompt without any.
    """

    def answers(epoch: Mapping) -> list[np.ndarray]:
        texts = (sample["text"] for sample in epoch["samples"][:samples])
        return [np.array([*encode(text), END_TOKEN][:max_tokens], np.int32) for text in texts]

    found = {}
    for line in lines:
        if not line["epochs"] or not line["epochs"][-1]["samples"]:
            raise BadInput(f"{line['prompt_id']}: its last checkpoint has no sample to roll out; leave the prompt out")
        *past, now = line["epochs"]
        history = [
            PastAnswer("", number, 0, sample.get("reward"), tokens)
            for number, epoch in enumerate(past)
            for sample, tokens in zip(epoch["samples"], answers(epoch), strict=False)
        ]
        prompt = np.array(encode(line["prompt"]), np.int32)
        found[str(line["prompt_id"])] = Recorded(prompt, answers(now), history)
    return found
