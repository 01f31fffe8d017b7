"""The samples of an open session that are in the core: they are submitted one by one, and each is answered as it ends.

A group of the core has one prompt, one token limit, one set of sampling parameters and one adapter, so a name that is
requested with several of them has several such groups. A sample of several turns is one sample, in the group of its
first turn. Invariant: each turn's answer is given once, whatever ends it. Called by `OpenSessions` and `LiveBatches`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tailrace.deployments.batches.held_samples import HeldRecords
from tailrace.deployments.batches.live_batch import LiveBatch, by_epoch, prediction_of
from tailrace.deployments.batches.prompts import Prepared, Prompts
from tailrace.deployments.batches.records import GroupRecord, SampleRecord, escaped
from tailrace.deployments.context.history import PastLength
from tailrace.deployments.messages.adapters import digest_of
from tailrace.deployments.messages.chunk import SampleKey, sample_key
from tailrace.deployments.messages.rollout import BatchSettings, Rejected, SamplingParams
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest
from tailrace.deployments.results.columns import Column
from tailrace.policies.protocol.actions import EndSample, EndTurn
from tailrace.policies.protocol.events import GroupSpec, SampleReturned, SamplesSubmitted

MAX_GROUP_SAMPLES = 64
"""Maximum number of samples of one group in the core. The lengths and tokens of their mates are known by then, and
later samples begin a new group.
"""


MAX_IDLE_GROUPS = 1_024
"""Maximum number of idle groups of one session: each holds the tokens of its ended samples."""


class GroupIdentity(NamedTuple):
    """Properties that samples of one group in the core share."""

    name: str
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    adapter_digest: str = ""
    features: str = ""  # their digest

    @classmethod
    def of(cls, prepared: Prepared) -> "GroupIdentity":
        group = prepared.group
        adapter = digest_of(prepared.adapter)
        features = "" if prepared.features is None else prepared.features.name
        return cls(group.prompt_id, prepared.token_ids, prepared.max_tokens, group.sampling, adapter, features)


class OpenGroup:
    """A group that takes further samples. `idle_since_s`: end of its last running sample. `is_wanted`: False if no
    sample is expected to come.
    """

    def __init__(self, group_id: str, identity: GroupIdentity):
        self.group_id, self.identity = group_id, identity
        self.running = 0
        self.idle_since_s = 0.0
        self.is_wanted = True


class NewSample(NamedTuple):
    """A sample that may be submitted to the core: its place, and the spec that submits it."""

    group: OpenGroup
    sample_id: str
    spec: GroupSpec


class OpenBatch(LiveBatch):
    """See the module docstring. `is_open`: False once the core takes no more of its samples."""

    def __init__(self, settings: BatchSettings, core_id: str, submitted_s: float):
        super().__init__(
            message=settings, core_id=core_id, delivery=None, prepared=[], past={}, submitted_s=submitted_s
        )
        self.is_open = True
        self._open: dict[GroupIdentity, OpenGroup] = {}
        self._by_id: dict[str, OpenGroup] = {}  # until the group is delivered
        self._of_name: dict[str, set[str]] = {}  # ids of these by their common name
        self._answered: dict[str, Callable[[SampleAnswer | Rejected], None]] = {}  # by id of an unended sample
        self._names = 0
        self.held = HeldRecords()

    @property
    def over(self) -> bool:
        return not (self.groups or self.is_open)

    @property
    def is_logged(self) -> bool:
        """False: a session's tokens are not in the token log. Its samples are requested again, and made again."""
        return False

    # ---- samples come ------------------------------------------------------------------------------

    def addition(self, specs: Iterable[GroupSpec], now_s: float) -> SamplesSubmitted:
        """Returns the event that submits more of its samples to the core, or closes groups."""
        return replace(self.submission(now_s), groups=tuple(specs), open=True)

    def plan(self, prepared: Prepared, request: SampleRequest, past: list[PastLength]) -> NewSample:
        """Plans the next sample of a prompt. Nothing changes until `take`."""
        identity = GroupIdentity.of(prepared)
        group = self._open.get(identity)
        is_new = group is None
        if is_new:
            group = OpenGroup(f"{self.core_id}/{escaped(identity.name, '#')}~{self._names}", identity)
        number = 0 if is_new else len(self.groups[group.group_id].samples)
        spec = GroupSpec(
            group_id=group.group_id,
            prompt_tokens=len(prepared.token_ids),
            samples=1,
            max_tokens=prepared.max_tokens,
            past_lengths=by_epoch(past) if is_new else (),
            open=number + 1 < min(request.of or MAX_GROUP_SAMPLES, MAX_GROUP_SAMPLES),
            chunk_tokens=request.chunk_tokens,
            hold_s=request.held_s,
            prediction=prediction_of(prepared.group) if is_new else None,
        )
        return NewSample(group, f"{group.group_id}#{number}", spec)

    def take(
        self, new: NewSample, prepared: Prepared, request: SampleRequest,
        answered: Callable[[SampleAnswer | Rejected], None], now_s: float,
    ) -> SampleRecord:  # fmt: skip
        """Records a planned sample that the core has taken. Returns its record. `answered`: called once, with the
        sample's answer.
        """
        group, settings = new.group, self.message
        record = self.groups.get(group.group_id)
        if record is None:
            # The name in the group context is unique: groups of one name may differ in their prompts.
            name = f"{settings.batch_id}~{self._names}"
            record = GroupRecord(
                batch_id=name,
                step=settings.step,
                group=prepared.group,
                prompt=np.asarray(prepared.token_ids, np.int32),
                prompt_key=prepared.prompt_key,
                adapter=prepared.adapter,
                features=prepared.features,
            )
            self.groups[group.group_id], self._by_id[group.group_id] = record, group
            self._of_name.setdefault(group.identity.name, set()).add(group.group_id)
            self._max_tokens[group.group_id] = prepared.max_tokens
            self._names += 1
        if new.spec.open:
            self._open[group.identity] = group
        else:
            self._open.pop(group.identity, None)
        sample = SampleRecord(record, request.index, self._key(request), None, now_s, hold_s=request.held_s)
        record.samples.append(sample)
        self.samples[new.sample_id] = record.samples[-1]
        group.running += 1
        group.is_wanted = True
        self._answered[new.sample_id] = answered
        samples, _ = self._sizes
        self._sizes = samples + 1, self._names
        return record.samples[-1]

    def _key(self, request: SampleRequest) -> SampleKey:
        name, settings = request.group.prompt_id, self.message
        return sample_key(settings.seed, settings.step, name, request.index, request.turn)

    # ---- samples are held between turns --------------------------------------------------------------

    def turn(
        self, prepared: Prepared, request: SampleRequest, answered: Callable[[SampleAnswer | Rejected], None],
        observe: Callable[[SampleReturned], Rejected | None], now_s: float,
    ) -> str | None:  # fmt: skip
        """Continues the held sample of a request, if the core takes it. Returns its id, or None.

        `observe`: gives the core an event. `answered`: called once, with the answer of this turn.
        """
        event = self.held.returning(prepared, request, now_s)
        if event is None or observe(event) is not None:
            return None
        sample = self.samples[event.sample_id]
        self.held.drop(event.sample_id, sample)
        prompt = np.asarray(prepared.token_ids, np.int32)
        features = prepared.features
        later = sample.next_turn(self._key(request), prompt, event.max_tokens, event.hold_s, now_s, features)
        mates = sample.group.samples
        mates[int(event.sample_id.rpartition("#")[2])] = self.samples[event.sample_id] = later
        self._answered[event.sample_id] = answered
        return event.sample_id

    def end_turn(self, action: EndTurn, now_s: float) -> None:
        super().end_turn(action, now_s)
        self.held.hold(action.sample_id, self.samples[action.sample_id])

    # ---- samples and groups end ----------------------------------------------------------------------

    def end(self, action: EndSample, now_s: float) -> SampleRecord:
        group = self._by_id[action.sample_id.rpartition("#")[0]]
        group.running -= 1
        group.idle_since_s = now_s
        sample = super().end(action, now_s)
        self.held.drop(action.sample_id, sample)
        return sample

    def answer(self, sample_id: str, prompts: Prompts) -> None:
        if sample_id not in self._answered:
            return  # it has ended between two turns
        sample = self.samples[sample_id]
        group = sample.group
        answer = SampleAnswer(
            batch_id=self.message.batch_id,
            group=group.group.prompt_id,
            prompt_token_ids=Column(sample.prompt),
            prompt_key=group.prompt_key,
            step=group.step,
            sample=sample.result(prompts),
        )
        self._answered.pop(sample_id)(answer)  # last, so that callers learn of an error before it

    def hand_out(self, group: GroupRecord, prompts: Prompts) -> None:
        """Does nothing: the group's samples have been delivered already."""

    def emit(self, group_id: str) -> GroupRecord:
        name = self._by_id.pop(group_id).identity.name
        self._of_name[name].discard(group_id)
        if not self._of_name[name]:
            del self._of_name[name]
        del self._max_tokens[group_id]
        return super().emit(group_id)

    def namesakes(self, group_id: str) -> list[GroupRecord]:
        others = self._of_name[self._by_id[group_id].identity.name] - {group_id}
        return [self.groups[other] for other in others]

    def expect_no_more(self, name: str) -> None:
        """Records that no sample is expected to come into the groups of a name: they close once nothing runs there."""
        for group_id in self._of_name.get(name, ()):
            self._by_id[group_id].is_wanted = False

    def _refuse(self, rejected: Rejected) -> None:
        self.is_open = False
        answered, self._answered = self._answered, {}
        for give in answered.values():
            give(rejected)

    def close_idle(self, before_s: float) -> list[GroupSpec]:
        """Closes the idle groups in which nothing has run since `before_s`, or which expect no sample, and the longest
        idle ones beyond MAX_IDLE_GROUPS. Returns the specs that close them in the core.
        """
        idle = sorted((one for one in self._open.values() if not one.running), key=lambda one: one.idle_since_s)
        many = max(0, len(idle) - MAX_IDLE_GROUPS)
        found = [
            one for place, one in enumerate(idle) if place < many or not one.is_wanted or one.idle_since_s <= before_s
        ]
        for group in found:
            del self._open[group.identity]
        return [GroupSpec(one.group_id, len(one.identity.token_ids), 0, one.identity.max_tokens) for one in found]

    def close(self) -> None:
        """Closes the batch: it takes no more samples."""
        self.is_open = False
        self._open.clear()
