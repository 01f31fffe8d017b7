"""Checks of every result that a simulated driver gets, and the observations of a run.

Invariant: a result that no run may give raises `Wrong`, in one line. Called by `drivers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch, SampleResult
from tailrace.lab.fuzz.chunks import logprob_of
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.disk import adapted, digest_of
from tailrace.lab.fuzz.token_law import EOS, TAIL
from tailrace.policies.core.failures import MAX_LOST, MAX_LOST_ALONE
from tailrace.policies.protocol.actions import SampleEnd


class Wrong(AssertionError):
    """A result that no run may give."""


@dataclass
class Ledger:
    """Observations of all drivers of a run. `contents`, `offered`: contents by weights version, those that its tokens
    came from and those that an update gave."""

    contents: dict[int, set[str]] = field(default_factory=lambda: {0: {"start"}})
    offered: dict[int, set[str]] = field(default_factory=lambda: {0: {"start"}})
    unread: set[int] = field(default_factory=set)  # versions that were accepted while no replica could read them
    samples: int = 0
    tokens: int = 0
    failed: int = 0
    cancelled: int = 0
    cancels: set[str] = field(default_factory=set)  # batches that somebody has cancelled
    version: int = 0  # the last one that an update gave
    policies_failed: bool = False  # a policy was in trouble: it may have ended batches


class ResultChecks:
    """Checks of the results of one run. They raise Wrong."""

    def __init__(self, cluster: SimulatedCluster, ledger: Ledger):
        self._cluster, self._ledger = cluster, ledger

    def check(self, batch: RolloutBatch, group: PromptGroup, result: GroupResult, floor: int = 0) -> None:
        """Checks the result of a group. `floor`: weights version of the last update of the client that requested it."""
        where = f"{batch.batch_id}/{group.prompt_id}"
        if (result.batch_id, result.prompt_token_ids) != (batch.batch_id, group.token_ids):
            raise Wrong(f"{where}: the result is of another prompt")
        if [sample.sample_index for sample in result.samples] != list(range(group.samples)):
            raise Wrong(f"{where}: samples {[sample.sample_index for sample in result.samples]} of {group.samples}")
        for sample in result.samples:
            if (lowest := min((one.weights_version for one in sample.segments), default=floor)) < floor:
                raise Wrong(f"{where}: tokens of weights {lowest}, after an update to {floor}")
            self.check_sample(batch, group, sample, f"{where}#{sample.sample_index}")

    def check_sample(self, batch: RolloutBatch, group: PromptGroup, sample: SampleResult, where: str) -> None:
        """Checks one sample of a group. `where`: its name in the error."""
        ledger, tokens = self._ledger, sample.token_ids
        ledger.samples += 1
        ledger.tokens += len(tokens)
        ledger.failed += sample.finish_reason is SampleEnd.FAILED
        ledger.cancelled += sample.finish_reason is SampleEnd.CANCELLED
        spans = [(segment.start, segment.end) for segment in sample.segments]
        if [start for start, _ in spans] != [0, *(end for _, end in spans)][: len(spans)]:
            raise Wrong(f"{where}: segments {spans} do not follow each other")
        if (spans[-1][1] if spans else 0) != len(tokens) or len(sample.logprobs) != len(tokens):
            raise Wrong(f"{where}: {len(tokens)} tokens, {len(sample.logprobs)} logprobs, segments {spans}")
        key = sample_key(batch.seed, batch.step, group.prompt_id, sample.sample_index)
        for segment in sample.segments:
            own = digest_of(f"{group.adapter}-{batch.step}") if group.adapter else ""
            if segment.adapter_digest != own:
                raise Wrong(f"{where}: tokens {segment.start} on are of adapter {segment.adapter_digest}, not {own}")
            self._segment(key, group.token_ids, tokens, segment, where)
        logprobs = list(map(logprob_of, tokens))
        if list(sample.logprobs) != logprobs or list(sample.raw_logprobs) != [2 * one for one in logprobs]:
            raise Wrong(f"{where}: logprobs are not those of its tokens")
        self._end(group.max_tokens, sample, where)
        if self._cluster.one_version and len(made_by := {one.weights_version for one in sample.segments}) > 1:
            raise Wrong(f"{where}: weights {sorted(made_by)} have made it, one after the other")
        if (problem := self._cluster.log_disk.problem(batch.batch_id, group.prompt_id, sample)) is not None:
            raise Wrong(f"{where}: {problem}")
        if sample.finish_reason is SampleEnd.CANCELLED and batch.batch_id not in ledger.cancels:
            raise Wrong(f"{where}: cancelled without a request")
        if (problem := self._cluster.culprits.problem(key, group.token_ids, sample)) is not None:
            raise Wrong(f"{where}: {problem}")
        self._given_up(key, sample, where)

    def check_turn(self, key: int, prompt: Sequence[int], max_tokens: int, sample: SampleResult, where: str) -> None:
        """Checks one turn of a sample by its own key: tokens, their logprobs and its end, which may be no failure."""
        tokens = sample.token_ids
        spans = [(segment.start, segment.end) for segment in sample.segments]
        if [place for span in spans for place in span] != sorted(place for span in spans for place in span):
            raise Wrong(f"{where}: segments {spans} do not follow each other")
        if (spans[-1][1] if spans else 0) != len(tokens):
            raise Wrong(f"{where}: {len(tokens)} tokens, segments {spans}")
        for segment in sample.segments:
            self._segment(key, prompt, tokens, segment, where)
        if list(sample.logprobs) != list(map(logprob_of, tokens)):
            raise Wrong(f"{where}: logprobs are not those of its tokens")
        self._end(max_tokens, sample, where)
        if sample.finish_reason is SampleEnd.CANCELLED:
            raise Wrong(f"{where}: cancelled without a request")
        self._given_up(key, sample, where)

    def _given_up(self, key: int, sample: SampleResult, where: str) -> None:
        """Checks that a sample which has failed may have: it ends engines, or seems to, or is a culprit."""
        if sample.finish_reason is not SampleEnd.FAILED:
            return
        by_themselves = MAX_LOST_ALONE if self._cluster.deadly else MAX_LOST_ALONE + MAX_LOST
        may_be_deadly = len(self._cluster.gone) >= by_themselves and " left: " in (sample.error or "")
        excused = key in self._cluster.deadly or self._cluster.culprits.is_to_blame(key, sample.error)
        if not may_be_deadly and not excused:
            raise Wrong(f"{where}: given up: {sample.error}")

    def _segment(self, key: int, prompt: Sequence[int], tokens: Sequence[int], segment, where: str) -> None:
        """Checks that weights of the segment's version may have drawn its tokens after those before it."""
        version, own, law = segment.weights_version, segment.adapter_digest, self._cluster.size.law
        whole, start, end = [*prompt, *tokens], len(prompt) + segment.start, len(prompt) + segment.end
        places = [(at, whole[max(0, at - TAIL) : at], whole[at]) for at in range(start, end)]
        fits = {
            content
            for content in self._ledger.offered.get(version, ())
            if all(token in law.candidates(key, adapted(content, own), at, tail) for at, tail, token in places)
        }
        if not fits:
            raise Wrong(f"{where}: tokens {segment.start} to {segment.end} are not those of weights {version}")
        if len(places) >= 8:  # else two contents may agree by chance
            known = self._ledger.contents.setdefault(version, fits)
            self._ledger.contents[version] = known & fits or fits
            if not known & fits and not self._cluster.forgetful:
                raise Wrong(f"{where}: weights {version} are {fits} here, and were {known} before")

    def _end(self, max_tokens: int, sample: SampleResult, where: str) -> None:
        tokens = sample.token_ids
        stops = [place for place, token in enumerate(tokens) if token == EOS]
        if stops and stops != [len(tokens) - 1]:
            raise Wrong(f"{where}: tokens follow its end at {stops[0]}")
        if (sample.finish_reason is SampleEnd.STOP) != bool(stops):
            raise Wrong(f"{where}: {len(tokens)} tokens, ends at {stops}, finish_reason {sample.finish_reason}")
        if sample.finish_reason is SampleEnd.LENGTH and len(tokens) != max_tokens:
            raise Wrong(f"{where}: {len(tokens)} tokens of at most {max_tokens} end it by length")
