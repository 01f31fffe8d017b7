"""Where drafts end, and how long they could be with better choices: `refused` and `oracle` of `bench drafts`.

A draft ends at its first wrong token, at its maximum length, or where no candidate is left. A wrong token is a wrong
branch if the right token was among the scored candidates. Otherwise the right token and the token before it are a pair
that was unknown (in prompt, mates and the sample so far), or known but not found. The oracles know the right tokens.
The first takes the best place that the index found in the group. The others verify several paths at once, as a tree of
drafts would.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from tailrace.deployments.draft_index.group_index import GroupIndex
from tailrace.deployments.draft_index.scorer import CandidateScorer
from tailrace.deployments.draft_index.scorer_kernels import CANDIDATES
from tailrace.lab.benchmarks.drafting.drafts import (
    DRAFT_TOKENS,
    MOST_MATES,
    RecordedRollouts,
    Setting,
    agreed,
    indexes,
    replay,
)

PATHS = (2, 4, 8)
ENDS = ("wrong_branch", "right_token_unknown", "right_token_not_found", "no_candidate", "stopped_by_length")


def measure(
    rollouts: list[RecordedRollouts], setting: Setting, new: Callable[[], CandidateScorer] = CandidateScorer
) -> dict:
    """Returns the shares of verifications by how their draft ended, and the tokens per step of the oracles."""
    oracle = {"places": round(_oracle(rollouts, setting, new()), 3)}
    for paths in PATHS:
        tally = replay(rollouts, setting._replace(paths=paths), new())
        oracle[f"paths_{paths}"] = round(tally.tokens_per_step, 3)
    return {"refused": _ends(rollouts, setting, new()), "oracle": oracle}


def _ends(rollouts: list[RecordedRollouts], setting: Setting, evidence: CandidateScorer) -> dict[str, float]:
    """Returns the shares of verifications by end of draft, among all in which no sample ended."""
    ends: Counter[str] = Counter()
    for index, prompt, target in indexes(rollouts, setting, evidence):
        pairs = {pair for text in (prompt.prompt, *prompt.mates[: setting.mates]) for pair in pairs_of(text)}
        before, truth, at = int(prompt.prompt[-1]), target.tolist(), 0
        while at < len(truth):
            paths = index.propose(MOST_MATES, DRAFT_TOKENS)
            draft = paths[0].tokens.tolist() if paths else []
            right = agreed(draft, truth, at)
            text = [before, *truth[at : at + right + 1]]
            if at + right < len(truth):
                ends[_end(index, draft, right, text, pairs)] += 1
            pairs.update(pairs_of(text))
            index.extend(MOST_MATES, at, target[at : at + right + 1])
            before, at = text[-1], at + right + 1
    whole = sum(ends.values())
    return {name: round(ends[name] / max(1, whole), 3) for name in ENDS}


def _end(index: GroupIndex, draft: list[int], right: int, text: list[int], pairs: set) -> str:
    if right == DRAFT_TOKENS:
        return "stopped_by_length"
    if right == len(draft):
        return "no_candidate"
    seen = index.candidates(MOST_MATES)[right]
    if text[-1] in seen[: seen[CANDIDATES]]:
        return "wrong_branch"
    return "right_token_not_found" if (text[-2], text[-1]) in pairs else "right_token_unknown"


def pairs_of(text) -> list[tuple[int, int]]:
    """Returns each token with the token after it."""
    tokens = np.asarray(text).tolist()
    return list(pairwise(tokens))


def _oracle(rollouts: list[RecordedRollouts], setting: Setting, evidence: CandidateScorer) -> float:
    """Returns tokens per step if each draft is the best of all places found, or the index's own draft if better."""
    tokens = steps = 0
    for index, _, target in indexes(rollouts, setting, evidence):
        truth, at = target.tolist(), 0
        while at < len(truth):
            paths = index.propose(MOST_MATES, DRAFT_TOKENS)
            places = evidence.ahead(DRAFT_TOKENS)[0, : evidence.told[0, 0]]
            ahead = np.full(DRAFT_TOKENS, -2, np.int32)
            ahead[: len(truth) - at] = truth[at : at + DRAFT_TOKENS]
            best = int((places == ahead).cumprod(axis=1).sum(axis=1).max(initial=0))
            best = max(best, agreed(paths[0].tokens.tolist(), truth, at) if paths else 0)
            emitted = min(best + 1, len(truth) - at)
            index.extend(MOST_MATES, at, target[at : at + emitted])
            tokens, steps, at = tokens + emitted, steps + 1, at + emitted
    return tokens / max(1, steps)
