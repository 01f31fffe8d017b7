"""The draft ladder (SpecActor 4.2): what each draft method gains over plain decoding, by how often drafts are right.

The target's tokens are not needed: a draft token counts as right with a given chance. Each step takes the seconds that
were measured on this machine, drafting included. Drafting and verification alternate. There is a ladder for one sample,
as in the tail, and one for a full engine, as when a training step starts. Invariant: written rungs are those of a
`MethodTable`. Called by `tailrace bench ladder`.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from tailrace.app.files.figures import new_figure, save
from tailrace.app.files.output_file import OutputFile
from tailrace.app.style.palette import REFERENCE
from tailrace.policies.families.racing import MethodProfile, MethodTable
from tailrace.policies.models.spec_cost_model import verified
from tailrace.policies.protocol.step_cost import StepCost

RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
CONTEXT_TOKENS, MATES, REPEATS = 512, 7, 200
PROMPT_TOKENS = 64
NGRAM = (2, 4)
"""Minimum and maximum length of the n-grams that are looked up."""

USUAL = {"group": 0.60, "history": 0.63, "ngram": 0.40}
"""Mean chances that a draft token is right, by `bench drafts` on AMC23 at checkpoint 800 with 8 draft tokens.

The tokens per verification were 2.52 with 7 mates, 2.68 with 16 earlier answers, and 1.65 with the sample alone.
--acceptance replaces the chances.
"""


class Rung(NamedTuple):
    """`draft_s(samples, window)`: seconds to draft a window of tokens for each of `samples` samples. `rates`: how often
    the method's drafts were right, sample by sample.
    """

    name: str
    draft_s: Callable[[int, int], float]
    rates: tuple[float, ...]


def rung(method: Rung, cost: StepCost, samples: int, most: int) -> tuple[MethodProfile, tuple[int, ...]]:
    """Returns the method's rung if `samples` samples decode together, and the best window of 1 to `most` tokens by
    point of the rung.

    A step makes 1 + p + ... + p^w tokens of each sample. It takes the time of w draft tokens and of a step with w + 1
    tokens of each sample. If a point is below 1, plain decoding is faster than every window.
    """
    plain_s = float(cost.at(samples))
    took_s = {w: method.draft_s(samples, w) + float(cost.at(samples * (w + 1))) for w in range(1, most + 1)}
    points, windows = [], []
    for rate in RATES:
        gains = {w: verified(rate, w + 1) * plain_s / step_s for w, step_s in took_s.items()}
        windows.append(max(gains, key=gains.get))
        points.append((rate, round(gains[windows[-1]], 4)))
    return MethodProfile(method.name, tuple(points), method.rates), tuple(windows)


def ladders(methods: list[Rung], cost: StepCost, most_running: int, most: int) -> dict:
    """Returns what `tailrace bench ladder` prints and writes: every rung and the first choice, for one sample and for
    `most_running` samples.
    """
    found = {}
    for samples in sorted({1, most_running}):
        rungs = [rung(method, cost, samples, most) for method in methods]
        ladder = MethodTable(tuple(made for made, _ in rungs))
        found[str(samples)] = {
            "rungs": [
                {"method": made.method, "curve": made.curve, "profile": made.profile, "windows": windows}
                for made, windows in rungs
            ],
            "first_choice": ladder.first_choice(),
        }
    draft_us = {
        method.name: {str(w): round(1e6 * method.draft_s(1, w), 1) for w in (1, 4, most) if w <= most}
        for method in methods
    }
    steps = {"tokens": cost.tokens, "ms": [round(1e3 * took_s, 3) for took_s in cost.seconds]}
    return {"ladders": found, "draft_us": draft_us, "steps": steps}


# ---- what drafting costs here ------------------------------------------------------------------------------


def index_methods(rates: Mapping[str, tuple[float, ...]], say: Callable[[str], None]) -> list[Rung]:
    """Returns the methods that look tokens up, timed over artificial answers that repeat each other as a group's do."""
    from tailrace.deployments.draft_index.group_index import warm_up

    warm_up()
    timed = {"group": _group_s, "history": _history_s, "ngram": _ngram_s}
    methods = []
    for name, seconds in timed.items():
        took_s = {window: seconds(window) for window in (1, 16)}
        say(f"{name}: {1e6 * took_s[1]:.0f} us for one draft token, {1e6 * took_s[16]:.0f} us for 16")
        methods.append(Rung(name, _line(took_s), rates.get(name, (USUAL[name],))))
    return methods


def model_method(cost: StepCost, rate: float) -> Rung:
    """Returns a draft model beside its target: w steps of one token for each sample (w times D(b) of SpecActor 4.1)."""
    return Rung("model", lambda samples, window: window * float(cost.at(samples)), (rate,))


def _line(took_s: Mapping[int, float]) -> Callable[[int, int], float]:
    (short, low), (wide, high) = took_s.items()
    return lambda samples, window: samples * (low + max(0.0, high - low) * (window - short) / (wide - short))


def _answers() -> list[np.ndarray]:
    """Returns an answer, int32, and MATES copies of it in which 5 of every 20 tokens are drawn again."""
    chance = np.random.default_rng(0)
    first = chance.integers(0, 2000, CONTEXT_TOKENS).astype(np.int32)
    answers = [first]
    for _ in range(MATES):
        mate, at = first.copy(), np.arange(CONTEXT_TOKENS) % 20 < 5
        mate[at] = chance.integers(0, 2000, int(at.sum()))
        answers.append(mate)
    return answers


def _group_s(window: int) -> float:
    return _index_s(window, MATES, 0)


def _history_s(window: int) -> float:
    return _index_s(window, 0, MATES)


def _index_s(window: int, mates: int, past: int) -> float:
    """Returns the median seconds of a proposal by the engine's own index, with the addition of the sample's newest
    token.
    """
    from tailrace.deployments.draft_index.group_index import GroupIndex, HistoryIndex
    from tailrace.deployments.draft_index.scorer import CandidateScorer
    from tailrace.deployments.messages.context import PastAnswer

    own, *others = _answers()
    evidence, prompt = CandidateScorer(), np.arange(PROMPT_TOKENS, dtype=np.int32)
    index = GroupIndex(evidence, prompt)
    if past:
        answers = [PastAnswer("", 0, 0, None, tokens) for tokens in others[:past]]
        index.attach(HistoryIndex.build(answers, 1, prompt, evidence.settings))
    for number, tokens in enumerate(others[:mates], start=1):
        index.extend(number, 0, tokens)
    begun = CONTEXT_TOKENS - REPEATS
    index.extend(0, 0, own[:begun])
    return _median_s(lambda turn: (index.extend(0, begun + turn, own[begun + turn :][:1]), index.propose(0, window)))


def _ngram_s(window: int) -> float:
    own, begun = _answers()[0], CONTEXT_TOKENS - REPEATS
    look_up(own, window)  # compiles
    return _median_s(lambda turn: look_up(own[: begun + turn], window))


def look_up(tokens: np.ndarray, most: int) -> np.ndarray:
    """Returns vLLM's own n-gram drafts after `tokens`, int32, at most `most`. Calls vLLM's function, since its class
    needs an engine.
    """
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as find

    return find(tokens, *NGRAM, len(tokens) + most, most)


def _median_s(act: Callable[[int], object]) -> float:
    took_s = []
    for turn in range(REPEATS):
        began_s = time.perf_counter()
        act(turn)
        took_s.append(time.perf_counter() - began_s)
    return median(took_s)


# ---- the picture -------------------------------------------------------------------------------------------


def picture(file: OutputFile, result: dict) -> None:
    """Draws the curves by method, one panel for each number of samples; a dot marks a method's mean rate."""
    found = result["ladders"]
    figure, panels = new_figure(6 * len(found), 4.5, 1, len(found), squeeze=False)
    for axes, (samples, of) in zip(panels[0], found.items(), strict=True):
        axes.axhline(1.0, color=REFERENCE, linewidth=0.8)
        for row in of["rungs"]:
            (line,) = axes.plot(*zip(*row["curve"], strict=True), label=row["method"])
            mean = sum(row["profile"]) / len(row["profile"])
            axes.plot([mean], [MethodProfile("", row["curve"], (mean,)).speedup(mean)], "o", color=line.get_color())
        choice = of["first_choice"] or "plain decoding"
        axes.set(xlabel="share of draft tokens that are right", ylabel="times as fast as plain decoding")
        axes.set_title(f"{samples} at once, first choice {choice}")
        axes.legend()
    save(figure, file)
