"""Tokens per verification that the draft index brings: a replay of recorded rollouts, without an engine.

Targets are the last two samples of each prompt's last checkpoint. Mates are its first samples, and history is the first
samples of the checkpoint before. Mates and history are known whole, a target up to the present token. A step drafts at
most DRAFT_TOKENS tokens, and makes the right ones and one more. Arctic's rule (arctic_inference) is measured over the
same targets. The scorer learns through all targets of a setting, as in an engine, and starts again for each setting.
Prompts follow one another, so each is also drafted from phrases of the mates and targets of earlier prompts. Phrases
are removed before the second targets, because the first targets are their mates. With `kept`, Arctic's tree keeps the
earlier prompts too.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tailrace.app.errors import BadInput
from tailrace.deployments.draft_index.group_index import GroupIndex, HistoryIndex, warm_up
from tailrace.deployments.draft_index.scorer import CandidateScorer
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.messages.context import PastAnswer

DRAFT_TOKENS = 8
TARGETS = 2
SURE = 0.5
"""Minimum chance of a draft token in the report `sure`: a draft ends before a token with a smaller chance."""

LENGTHS, WHOLE = (8, 16, 32, 64), 0.3
"""Maximum draft tokens in the reports of `lengths`, and the minimum chance there that all tokens of a draft are right.
"""

ARCTIC_DEPTH, ARCTIC_FACTOR = 64, 4.0
"""Depth of Arctic's tree, and the maximum length of its draft as a multiple of the match: 4 is better here than the
default of 1.
"""


class Setting(NamedTuple):
    """Numbers of mates and earlier answers to draft from, and of paths that are verified at once."""

    mates: int = 0
    history: int = 0
    paths: int = 1


SETTINGS = {
    "own": Setting(),
    "mates_1": Setting(1),
    "mates_3": Setting(3),
    "mates_7": Setting(7),
    "mates_15": Setting(15),
    "history_8": Setting(history=8),
    "history_16": Setting(history=16),
    "history_16_mates_7": Setting(7, 16),
    "mates_15_paths_4": Setting(15, paths=4),
}
MOST_MATES, MOST_HISTORY = 15, 16


class RecordedRollouts(NamedTuple):
    """One prompt's tokens: the samples to draft for, their mates, and earlier answers, newest epoch last."""

    prompt: np.ndarray
    targets: list[np.ndarray]
    mates: list[np.ndarray]
    history: list[PastAnswer]


class Tally:
    """Counts of a replay's steps."""

    def __init__(self):
        self.tokens = self.steps = self.drafted = self.accepted = 0
        self.index_bytes = self.index_tokens = 0
        self.propose_s: list[float] = []
        self.bins = np.zeros((10, 3))
        """f64[10, 3] by predicted probability, in tenths: number of draft tokens that were tested, the sum of their
        predicted probabilities, and the number of right ones.
        """

    @property
    def tokens_per_step(self) -> float:
        """Tokens per verification, the bonus token included."""
        return self.tokens / max(1, self.steps)

    @property
    def calibration_gap(self) -> float:
        """Mean distance between the predicted and the observed share of right tokens over the bins, weighted by their
        tokens.
        """
        return float(np.abs(self.bins[:, 1] - self.bins[:, 2]).sum() / max(1.0, self.bins[:, 0].sum()))

    def add(self, drafts: list[list[int]], accepted: int, emitted: int) -> None:
        """Records a step. `drafts`: its paths. `accepted`: right tokens of the best path. `emitted`: all its tokens."""
        self.steps += 1
        self.tokens += emitted
        self.drafted += sum(len(draft) for draft in drafts)
        self.accepted += accepted


def read_rollouts(lines: list[dict], encode: Callable[[str], list[int]]) -> list[RecordedRollouts]:
    """Returns the prompts of a trace in tokens.

    Raises BadInput if a prompt has no checkpoint, or if its last one has no sample besides the targets.
    """
    found = []
    for line in lines:
        if not line["epochs"]:
            raise BadInput(f"{line['prompt_id']}: `epochs` is empty; a prompt needs at least one checkpoint")
        *past, now = line["epochs"]
        texts = [sample["text"] for sample in now["samples"]]
        if len(texts) <= TARGETS:
            raise BadInput(
                f"{line['prompt_id']}: {len(texts)} samples in its last checkpoint; {TARGETS + 1} are needed"
            )
        earlier = past[-1]["samples"][:MOST_HISTORY] if past else []
        tokens = [np.array(encode(text), np.int32) for text in texts[:MOST_MATES] + texts[-TARGETS:]]
        history = [
            PastAnswer("", len(past) - 1, 0, sample.get("reward"), np.array(encode(sample["text"]), np.int32))
            for sample in earlier
        ]
        mates = tokens[:-TARGETS][: len(texts) - TARGETS]
        found.append(RecordedRollouts(np.array(encode(line["prompt"]), np.int32), tokens[-TARGETS:], mates, history))
    return found


def indexes(
    rollouts: list[RecordedRollouts], setting: Setting, evidence: CandidateScorer
) -> Iterator[tuple[GroupIndex, RecordedRollouts, np.ndarray]]:
    """Yields for every target an index with its mates and history, its prompt, and the target's tokens."""
    for number in range(max(len(prompt.targets) for prompt in rollouts)):
        evidence.forget()
        for prompt in rollouts:
            if number >= len(prompt.targets):
                continue
            index = GroupIndex(evidence, prompt.prompt)
            answers = prompt.history[: setting.history]
            if answers:
                now = 1 + max(answer.epoch for answer in answers)
                index.attach(HistoryIndex.build(answers, now, prompt.prompt, evidence.settings))
            for mate, tokens in enumerate(prompt.mates[: setting.mates]):
                index.extend(mate, 0, tokens)
            yield index, prompt, prompt.targets[number]


def replay(
    rollouts: list[RecordedRollouts], setting: Setting, evidence: CandidateScorer | None = None, least: float = 0.0,
    most: int = DRAFT_TOKENS, whole: float = 0.0,
) -> Tally:  # fmt: skip
    """Drafts for every target from its first token to its last, at most `most` tokens per step. Returns the counts.

    A draft ends where a token's chance is below `least`, or the chance of all its tokens is below `whole`.
    """
    tally, me = Tally(), MOST_MATES
    for index, _, target in indexes(rollouts, setting, evidence or CandidateScorer()):
        truth, at = target.tolist(), 0
        while at < len(truth):
            began_s = time.perf_counter()
            proposals = index.propose(me, most, setting.paths, whole)
            tally.propose_s.append(time.perf_counter() - began_s)
            drafts = [_above(proposal, least) for proposal in proposals]
            accepted = max((agreed(draft, truth, at) for draft in drafts), default=0)
            if proposals:
                _note(tally.bins, proposals[0].right[: len(drafts[0])], agreed(drafts[0], truth, at))
            emitted = min(accepted + 1, len(truth) - at)
            tally.add(drafts, accepted, emitted)
            index.extend(me, at, target[at : at + emitted])
            at += emitted
        tally.index_bytes += index.nbytes
        tally.index_tokens += index.tokens
    return tally


def _above(proposal, least: float) -> list[int]:
    low = np.flatnonzero(proposal.right < least)
    return proposal.tokens[: low[0] if len(low) else None].tolist()


def agreed(draft: list[int], truth: list[int], at: int) -> int:
    count = 0
    while count < len(draft) and at + count < len(truth) and draft[count] == truth[at + count]:
        count += 1
    return count


def _note(bins: np.ndarray, right: np.ndarray, agreed: int) -> None:
    for place, chance in enumerate(right[: agreed + 1].tolist()):
        bins[min(9, int(chance * 10))] += 1, chance, place < agreed


def replay_arctic(rollouts: list[RecordedRollouts], setting: Setting, kept: bool = False) -> Tally:
    """Drafts for the same targets by Arctic's rule: after the longest match, in its own tree or that of others.

    For a setting with several paths, the drafts are trees of tokens. `kept`: the tree of others also holds the earlier
    prompts.
    """
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    tally = Tally()
    for number in range(max(len(prompt.targets) for prompt in rollouts)):
        cache = SuffixDecodingCache(ARCTIC_DEPTH)
        for place, prompt in enumerate(rollouts):
            if number >= len(prompt.targets):
                continue
            cache = cache if kept else SuffixDecodingCache(ARCTIC_DEPTH)
            others = prompt.mates[: setting.mates] + [answer.tokens for answer in prompt.history[: setting.history]]
            for mate, other in enumerate(others):
                _tell_arctic(cache, f"{place}/{mate}", other)
            name = f"{place}/target"
            cache.start_request(name, prompt.prompt)
            _follow_arctic(cache, name, prompt.prompt, prompt.targets[number], setting.paths, tally)
            cache.stop_request(name)
    return tally


def _tell_arctic(cache, name: str, tokens: np.ndarray) -> None:
    cache.start_request(name, np.empty(0, np.int32))
    cache.add_active_response(name, tokens)
    cache.stop_request(name)


def _follow_arctic(cache, name: str, prompt: np.ndarray, target: np.ndarray, paths: int, tally: Tally) -> None:
    whole, truth, at = np.concatenate([prompt, target]), target.tolist(), 0
    while at < len(truth):
        end = len(prompt) + at
        began_s = time.perf_counter()
        draft = cache.speculate(
            name,
            whole[max(0, end - ARCTIC_DEPTH) : end],
            max_spec_tokens=DRAFT_TOKENS * paths,
            max_spec_factor=ARCTIC_FACTOR,
            use_tree_spec=paths > 1,
        )
        tally.propose_s.append(time.perf_counter() - began_s)
        accepted = _agreed_in_tree(draft.token_ids, draft.parents, truth, at)
        emitted = min(accepted + 1, len(truth) - at)
        tally.add([draft.token_ids], accepted, emitted)
        cache.add_active_response(name, target[at : at + emitted])
        at += emitted


def _agreed_in_tree(tokens: list[int], parents: list[int], truth: list[int], at: int) -> int:
    node, count = -1, 0
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):  # parents come before their children
        if parent == node and at + count < len(truth) and token == truth[at + count]:
            node, count = place, count + 1
    return count


def measure(rollouts: list[RecordedRollouts], say: Callable[[str], None], prior: Path | None = None) -> dict:
    """Returns the figures of all settings, by our index and by Arctic's rule. Times are wall microseconds of `propose`
    with 15 mates, on one thread.

    `prior`: a file of `--fit` from which the scorer starts, or None for its own file.
    """
    from tailrace.lab.benchmarks.drafting import drafts_joined, drafts_refused

    warm_up()
    ours, theirs, kept, full = {}, {}, {}, SETTINGS["mates_15"]
    for name, setting in SETTINGS.items():
        ours[name], theirs[name] = replay(rollouts, setting, _begun(prior)), replay_arctic(rollouts, setting)
        kept[name] = replay_arctic(rollouts, setting, kept=True)
        each = [tallies[name].tokens_per_step for tallies in (ours, theirs, kept)]
        say(f"{name}: {each[0]:.3f} tokens per step, Arctic's rule {each[1]:.3f}, kept {each[2]:.3f}")
    alone = replay(rollouts, full, _begun(prior, IndexSettings(other_prompts=False)))
    lengths = {f"{most}": replay(rollouts, full, _begun(prior), 0.0, most, WHOLE) for most in LENGTHS}
    us, arctic_us = (np.array(tallies["mates_15"].propose_s) * 1e6 for tallies in (ours, theirs))
    main = ours["mates_15"]
    return {
        "tokens_per_step": {name: round(tally.tokens_per_step, 3) for name, tally in ours.items()},
        "arctic_tokens_per_step": {name: round(tally.tokens_per_step, 3) for name, tally in theirs.items()},
        "arctic_kept_tokens_per_step": {name: round(tally.tokens_per_step, 3) for name, tally in kept.items()},
        "without_other_prompts": round(alone.tokens_per_step, 3),
        **drafts_refused.measure(rollouts, full, lambda: _begun(prior)),
        "joined": drafts_joined.measure(rollouts, full, lambda: _begun(prior)),
        "lengths": {name: _came_to(tally) for name, tally in lengths.items()},
        "accepted_share": {name: round(tally.accepted / max(1, tally.drafted), 3) for name, tally in ours.items()},
        "drafted_per_step": {name: round(tally.drafted / max(1, tally.steps), 2) for name, tally in ours.items()},
        "sure": _came_to(replay(rollouts, full, _begun(prior), least=SURE)),
        "calibration_gap": round(main.calibration_gap, 4),
        "propose_us_p50": round(float(np.quantile(us, 0.5)), 1),
        "propose_us_p99": round(float(np.quantile(us, 0.99)), 1),
        "arctic_propose_us_p50": round(float(np.quantile(arctic_us, 0.5)), 1),
        "bytes_per_token": round(main.index_bytes / main.index_tokens, 1),
        "prompts": len(rollouts),
        "targets": sum(len(prompt.targets) for prompt in rollouts),
        "mates": min(len(prompt.mates) for prompt in rollouts),
        "history": min(len(prompt.history) for prompt in rollouts),
    }


def _begun(prior: Path | None, settings: IndexSettings = IndexSettings()) -> CandidateScorer:  # noqa: B008 -- frozen
    return CandidateScorer(settings, prior)


def _came_to(tally: Tally) -> dict[str, float]:
    return {
        "tokens_per_step": round(tally.tokens_per_step, 3),
        "accepted_share": round(tally.accepted / max(1, tally.drafted), 3),
        "drafted_per_step": round(tally.drafted / max(1, tally.steps), 2),
    }
