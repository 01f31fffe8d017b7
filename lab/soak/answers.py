"""Every answer of a soak against its reference, and the number of samples that a driver never got.

A sample's tokens are a function of weights, prompt, sampling and key, so each batch has one reference for each folder
of weights, made undisturbed. Invariant: a sample counts once, also if its driver came back and got it again; each
delivery is compared. A sample that crossed an update is compared up to there; the rest is left to crossings.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, SampleResult
from tailrace.lab.soak.scripts import DriverScript
from tailrace.lab.verification.tokens import difference
from tailrace.policies.protocol.actions import SampleEnd

UNFINISHED = (SampleEnd.FAILED, SampleEnd.CANCELLED)


class Stretch(NamedTuple):
    """Tokens start to end of an answer, made under weights number `weights`."""

    weights: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Crossed:
    """A sample that crossed an update: its stretches after the first have no reference yet."""

    batch: RolloutBatch
    group: GroupResult
    sample: SampleResult
    stretches: tuple[Stretch, ...]


def stretches_of(sample: SampleResult, weights: int) -> tuple[Stretch, ...]:
    """Returns the stretches of a sample. Version v has the weights number v modulo `weights`."""
    found: list[Stretch] = []
    for segment in sample.segments:
        number = segment.weights_version % weights
        if found and found[-1].weights == number:
            found[-1] = found[-1]._replace(end=segment.end)
        else:
            found.append(Stretch(number, segment.start, segment.end))
    return tuple(found)


def cut(sample: SampleResult, start: int, end: int) -> SampleResult:
    """Returns the sample with tokens start to end alone. The finish reason is kept if the whole rest is."""
    kinds = ("token_ids", "logprobs", "raw_logprobs")
    changes = {kind: getattr(sample, kind)[start:end] for kind in kinds}
    whole = end >= len(sample.token_ids) and sample.finish_reason not in UNFINISHED
    return sample.model_copy(update=changes | ({} if whole else {"finish_reason": SampleEnd.LENGTH}))


class AnswerBook:
    """`weights`: the number of folders of weights."""

    def __init__(self, scripts: Iterable[DriverScript], weights: int):
        self._scripts = {script.name: script for script in scripts}
        self._weights = weights
        self._references: dict[tuple[str, int, int], dict[tuple[str, int], SampleResult]] = {}
        self._digests: dict[int, str] = {}
        self._open: dict[str, tuple[int, set[tuple[str, int]]]] = {}  # by driver, its batch and the samples that it has
        self.counts = Counter(dict.fromkeys(("batches", "samples", "tokens", "lost", "repeated", "updates"), 0))
        self.failed: Counter[str] = Counter()
        self.wrong: list[dict] = []
        self.crossed: list[Crossed] = []
        self.errors: list[str] = []  # of drivers
        self._updated = -1

    def learn(self, name: str, number: int, weights: int, groups: Iterable[GroupResult]) -> None:
        """Takes the reference of a driver's batch `number` under a folder of weights. Raises ValueError if it is not
        one.
        """
        samples = {(group.prompt_id, one.sample_index): one for group in groups for one in group.samples}
        for key, one in samples.items():
            if one.finish_reason in UNFINISHED or {s.weights for s in stretches_of(one, self._weights)} - {weights}:
                raise ValueError(f"the reference of {name} {number} is broken: {key} {one.finish_reason} {one.error}")
            self._digests.setdefault(weights, one.segments[-1].weights_digest if one.segments else "")
        self._references[name, number, weights] = samples

    def hear(self, name: str, event: Mapping) -> None:
        """Takes an event of a driver, see lab/soak/driver.py."""
        match event["event"]:
            case "began":
                if self._open.get(name, (None,))[0] != event["batch"]:
                    self._open[name] = (event["batch"], set())
            case "group":
                self._take(name, event["batch"], GroupResult.model_validate(event["group"]))
            case "ended":
                self.close(name)
                self.counts["batches"] += 1
            case "updated":
                if event["version"] > self._updated:  # a driver that came back repeats its last update
                    self._updated = event["version"]
                    self.counts["updates"] += 1
            case "error":
                self.errors.append(f"{name}: {event['text']}")

    def close(self, name: str) -> None:
        """Records that no more answers of the driver's batch will come: the missing ones are lost."""
        number, have = self._open.pop(name, (None, set()))
        if number is not None:
            expected = sum(group.samples for group in self._scripts[name].batch(number).groups)
            self.counts["lost"] += expected - len(have)

    @property
    def unfinished(self) -> int:
        """Returns the number of samples of batches in flight that have not come yet."""
        batches = ((self._scripts[name].batch(number), have) for name, (number, have) in self._open.items())
        return sum(sum(group.samples for group in batch.groups) - len(have) for batch, have in batches)

    def _take(self, name: str, number: int, group: GroupResult) -> None:
        have = self._open[name][1]
        for sample in group.samples:
            new = (group.prompt_id, sample.sample_index) not in have
            have.add((group.prompt_id, sample.sample_index))
            self.counts["samples" if new else "repeated"] += 1
            self.counts["tokens"] += new * len(sample.token_ids)
            if sample.finish_reason in UNFINISHED:
                self.failed[f"{sample.finish_reason}: {sample.error or 'no reason'}"] += 1
            self._compare(name, number, group, sample)

    def _compare(self, name: str, number: int, group: GroupResult, sample: SampleResult) -> None:
        script = self._scripts[name]
        stretches = stretches_of(sample, self._weights)
        self._check_weights(script.batch(number), group, sample)
        if not stretches:  # it failed without a token
            return
        first, template = stretches[0], number % len(script.batches)
        reference = self._references[name, template, first.weights].get((group.prompt_id, sample.sample_index))
        whole = len(stretches) == 1 and sample.finish_reason not in UNFINISHED
        expected = reference if whole or reference is None else cut(reference, 0, first.end)
        found, _ = difference(sample if whole else cut(sample, 0, first.end), expected)
        if found:
            self.blame(script.batch(number), group, sample, found)
        if len(stretches) > 1:
            self.crossed.append(Crossed(script.batch(number), group, sample, stretches))

    def _check_weights(self, batch: RolloutBatch, group: GroupResult, sample: SampleResult) -> None:
        """Checks that each segment names the content of its weights, and that they are none before the batch's."""
        for segment in sample.segments:
            digest = self._digests.get(segment.weights_version % self._weights, "")
            is_other = digest and segment.weights_digest and segment.weights_digest != digest
            if is_other or segment.weights_version < (batch.weights_version or 0):
                self.blame(batch, group, sample, {"position": segment.start, "what": "weights"})

    def blame(self, batch: RolloutBatch, group: GroupResult, sample: SampleResult, found: Mapping) -> None:
        """Records a wrong sample. `found`: its first difference."""
        versions = [(one.weights_version, one.start, one.end, one.replica_id) for one in sample.segments]
        at = {"batch_id": batch.batch_id, "prompt_id": group.prompt_id, "sample_index": sample.sample_index}
        self.wrong.append({**at, **found, "segments": versions})
