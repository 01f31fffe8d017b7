"""Fit of the draft index's prior (deployments/draft_index/scorer_weights.json) to a trace: `bench drafts --fit FILE`.

The targets are answers of the checkpoint before the last, so that `bench drafts` finds new targets in the last one.
Mates come from the same checkpoint; the last one replaces history. Each draft is a training example, as in an engine.
Here the examples are collected and fitted together (Adam), with inputs scaled to mean 0 and deviation 1.
"""

import json
from collections.abc import Callable

import numpy as np

from tailrace.app.errors import BadInput
from tailrace.app.files.output_file import OutputFile
from tailrace.deployments.draft_index import group_index as draft_index
from tailrace.deployments.draft_index.alignment_state import TrainingExample
from tailrace.deployments.draft_index.scorer import CandidateScorer
from tailrace.deployments.draft_index.scorer_kernels import CANDIDATES, HIDDEN
from tailrace.deployments.messages.context import PastAnswer
from tailrace.lab.benchmarks.drafting.drafts import MOST_HISTORY, MOST_MATES, RecordedRollouts, Setting, replay

CURRICULUM = (
    (Setting(15), 5),
    (Setting(7, 16), 4),
    (Setting(0, 16), 2),
    (Setting(7), 2),
    (Setting(3, 8), 2),
    (Setting(), 2),
)
"""Settings, and the number of targets of each prompt that are drafted for with each."""

PASSES, BATCH, RATE = 6, 256, 0.01


class Recorder(CandidateScorer):
    """A scorer that keeps its training examples instead of learning from them."""

    def __init__(self):
        super().__init__()
        self.features, self.counts, self.answers = [], [], []

    def learn(self, lesson: TrainingExample, truth: np.ndarray) -> None:
        """Keeps the candidates of each position, and the place of the right one: CANDIDATES if none is right."""
        for k in range(min(len(lesson.seen), len(truth))):
            count = lesson.seen[k, CANDIDATES]
            if not count:
                return
            right = np.flatnonzero(lesson.seen[k, :count] == truth[k])
            self.features.append(lesson.features[k] / self.norm[1] + self.norm[0])
            self.counts.append(count)
            self.answers.append(right[0] if len(right) else CANDIDATES)


def earlier_rollouts(lines: list[dict], encode: Callable[[str], list[int]]) -> list[RecordedRollouts]:
    """Returns targets and mates of the checkpoint before the last, and answers of the last one as history.

    Raises BadInput if the checkpoint before the last is missing or has too few samples.
    """
    targets, found = sum(count for _, count in CURRICULUM), []
    for line in lines:
        texts = [[sample["text"] for sample in epoch["samples"]] for epoch in line["epochs"][-2:]]
        if len(texts) < 2 or len(texts[0]) <= targets:
            raise BadInput(f"{line['prompt_id']}: --fit takes two checkpoints and over {targets} samples in the first")
        tokens = [[np.array(encode(text), np.int32) for text in checkpoint] for checkpoint in texts]
        history = [PastAnswer("", 0, 0, None, answer) for answer in tokens[1][:MOST_HISTORY]]
        mates = tokens[0][:-targets][:MOST_MATES]
        found.append(RecordedRollouts(np.array(encode(line["prompt"]), np.int32), tokens[0][-targets:], mates, history))
    return found


def fit(rollouts: list[RecordedRollouts], say: Callable[[str], None]) -> dict[str, list]:
    """Returns the prior in the format of scorer_weights.json."""
    recorder, first = Recorder(), 0
    draft_index.LESSONS = 1  # learn from every draft
    for setting, count in CURRICULUM:
        chosen = [prompt._replace(targets=prompt.targets[first : first + count]) for prompt in rollouts]
        tally = replay(chosen, setting, recorder)
        say(f"{setting}: {tally.tokens_per_step:.3f} tokens per step, {len(recorder.answers)} lessons so far")
        first += count
    return _fitted(np.array(recorder.features), np.array(recorder.counts), np.array(recorder.answers))


def _fitted(features: np.ndarray, counts: np.ndarray, answers: np.ndarray) -> dict[str, list]:
    import torch

    torch.manual_seed(0)
    x, y = torch.tensor(features, dtype=torch.float32), torch.tensor(answers)
    real = torch.arange(CANDIDATES)[None] < torch.tensor(counts)[:, None]
    mean, scale = x[real].mean(0), 1 / (x[real].std(0) + 1e-3)
    x = (x - mean) * scale * real[..., None]
    inner, outer = torch.nn.Linear(x.shape[-1], HIDDEN), torch.nn.Linear(HIDDEN, 1, bias=False)
    none = torch.nn.Parameter(torch.zeros(1))
    steps = PASSES * -(-len(x) // BATCH)
    optimizer = torch.optim.Adam([*inner.parameters(), *outer.parameters(), none], lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(PASSES):
        for part in torch.randperm(len(x)).split(BATCH):
            scores = outer(torch.relu(inner(x[part])))[..., 0].masked_fill(~real[part], -torch.inf)
            scores = torch.cat([scores, none.expand(len(part), 1)], 1)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, y[part]).backward()
            optimizer.step()
            schedule.step()
    parts = {"mean": mean, "scale": scale, "inner": inner.weight.T, "offset": inner.bias, "outer": outer.weight}
    arrays = {name: np.atleast_2d(part.detach().numpy()) for name, part in (parts | {"none": none}).items()}
    return {name: np.round(array.astype(float), 5).tolist() for name, array in arrays.items()}


def write(prior: dict[str, list], file: OutputFile) -> None:
    """Writes the file that `CandidateScorer` reads."""
    file.write(json.dumps(prior) + "\n")
