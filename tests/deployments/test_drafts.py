"""Drafts of one engine: limits, counts and memory. The request stands in for vLLM's, whose two attributes are used."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from tailrace.deployments.draft_index.group_index import GroupIndex
from tailrace.deployments.draft_index.proposal import accepted_tokens
from tailrace.deployments.drafting.drafts import EngineDrafts
from tailrace.deployments.drafting.group_indexes import GroupIndexes
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import Fetched, GroupRef, PastAnswer, Piece, Source
from tailrace.deployments.messages.drafts import DraftPlan, DraftReport
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.policies.families.aimd import Aimd
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.families.goodput import Goodput

PROMPT = np.arange(100, 120, dtype=np.int32)
ANSWER = list(range(1000, 1060))
FIXED = FixedBudget(tokens=8)


@dataclass
class Request:
    num_tokens: int
    spec_token_ids: list[int] = field(default_factory=list)
    request_id: str = ""


class Engine:
    """Runs chunks of one group that all write ANSWER, a draft's agreeing tokens and one more at a time."""

    def __init__(self, drafts: EngineDrafts, policy=FIXED):
        self.drafts, self.policy = drafts, policy
        self.requests: dict[str, tuple[Request, int]] = {}
        drafts.performance.steps.record(1, 0.01)
        drafts.performance.steps.record(16, 0.011)

    def start(
        self, sample_index: int, generated: int, max_tokens: int, group: str = "b/p", policy=None, method=None
    ) -> str:
        chunk_id = f"{group}#{sample_index}:{generated}"
        plan = DraftPlan(GroupRef(group, "key"), sample_index, 0, 60, (0, 0), policy or self.policy, method=method)
        context = np.concatenate([PROMPT, np.array(ANSWER[:generated], np.int32)])
        chunk = ChunkRequest(chunk_id, 0, context, len(PROMPT), max_tokens, SamplingParams(), 0, draft=plan)
        self.requests[chunk_id] = Request(len(context)), generated + max_tokens
        self.drafts.open(chunk, self.requests[chunk_id][0])
        return chunk_id

    def step(self) -> dict[str, list[int]]:
        """One step of every chunk; the drafts that it verified."""
        verified, ended = {}, []
        for chunk_id, (request, until) in self.requests.items():
            at = request.num_tokens - len(PROMPT)
            draft, request.spec_token_ids = request.spec_token_ids, []
            verified[chunk_id] = draft
            tokens = ANSWER[at : at + accepted_tokens(draft, ANSWER[at:]) + 1]
            assert at + len(tokens) <= until
            request.num_tokens += len(tokens)
            self.drafts.made_by([(chunk_id, tokens)])
            if at + len(tokens) == until:
                ended.append(chunk_id)
        for chunk_id in ended:
            self.end(chunk_id)
        self.drafts.propose()
        return verified

    def end(self, chunk_id: str) -> DraftReport:
        del self.requests[chunk_id]
        return self.drafts.close(chunk_id)


@pytest.fixture
def drafts():
    made = EngineDrafts(DraftConfig(method="group", draft_tokens=16), 4096, None)
    yield made
    made.stop()


def test_a_mate_that_has_written_the_same_is_drafted_from(drafts):
    engine = Engine(drafts)
    first = engine.start(0, 0, 60)
    while first in engine.requests:
        engine.step()
    second = engine.start(1, 0, 60)
    lengths = []
    while second in engine.requests:
        lengths.append(len(engine.step()[second]))
    assert max(lengths) == 8 and len(lengths) < 20
    assert drafts.counts()["accepted.mate"] > 30


@pytest.mark.parametrize(("method", "drafted"), [("group", True), ("ngram", False), ("history", False), (None, True)])
def test_a_copy_drafts_by_its_method(drafts, method, drafted):
    """Here only a mate has written anything like it."""
    assert drafts.methods == ("group", "history", "ngram")
    engine = Engine(drafts)
    first = engine.start(0, 0, 60)
    while first in engine.requests:
        engine.step()
    copy = engine.start(1, 0, 60, method=method)
    verified = [engine.step()[copy] for _ in range(6)]
    assert any(verified) == drafted


def test_no_draft_reaches_behind_the_chunk(drafts):
    engine = Engine(drafts)
    first = engine.start(0, 0, 60)
    while first in engine.requests:
        engine.step()
    chunk = engine.start(1, 10, 5)
    while chunk in engine.requests:  # Engine.step asserts it
        assert len(engine.step()[chunk]) < 5


def test_no_draft_reaches_behind_the_models_context():
    drafts = EngineDrafts(DraftConfig(method="group"), len(PROMPT) + 20, None)
    engine = Engine(drafts)
    first = engine.start(0, 0, 60)
    while first in engine.requests:
        engine.step()
    request, _ = engine.requests[engine.start(1, 0, 60)]
    while request.num_tokens < len(PROMPT) + 20:
        engine.step()
        assert request.num_tokens + len(request.spec_token_ids) <= len(PROMPT) + 20
    drafts.stop()


def test_what_was_drafted_is_counted_by_position_and_source(drafts):
    engine = Engine(drafts)
    first = engine.start(0, 0, 60)
    while first in engine.requests:
        engine.step()
    second = engine.start(1, 0, 60)
    verified = [engine.step()[second] for _ in range(5)]
    position = engine.requests[second][0].num_tokens - len(PROMPT)
    report = engine.end(second)
    assert report.verifications == 5
    assert report.drafted.sum() == sum(map(len, verified))
    assert report.accepted.sum() == report.accepted_at.sum() == position - 5
    assert (np.diff(report.accepted_at) <= 0).all()
    assert report.accepted[Source.HISTORY] == 0


def test_reports_of_a_samples_chunks_add_up():
    own, mate = bytearray([Source.OWN]), bytearray([Source.MATE])
    short = DraftReport.of(1, own * 2, own, bytearray([1]), 2)
    long = DraftReport.of(1, mate * 4, mate * 3, bytearray([3]), 4)
    short.add(long)
    assert short.verifications == 2
    assert short.drafted.tolist() == [2, 4, 0, 0, 0, 0] and short.accepted.tolist() == [1, 3, 0, 0, 0, 0]
    assert short.accepted_at.tolist() == [2, 1, 1, 0]


def test_behind_a_stop_token_the_bonus_token_is_missing():
    assert accepted_tokens([5, 6, 7], [5, 6]) == 2
    assert accepted_tokens([5, 6, 7], [5, 9]) == 1
    assert accepted_tokens([], [5]) == 0


def test_slots_are_used_again_and_never_shared(drafts):
    engine = Engine(drafts, Goodput())
    for turn in range(5):
        chunks = [engine.start(index, 0, 60, group=f"b/{turn}") for index in range(7)]
        slots = [drafts._running[chunk].slot for chunk in chunks]
        assert sorted(slots) == list(range(7))
        engine.step()
        for chunk in chunks:
            engine.end(chunk)


def test_indexes_of_idle_groups_go_when_memory_is_short_and_running_ones_stay():
    drafts = EngineDrafts(DraftConfig(method="group", index_mib=1), 4096, None)
    engine = Engine(drafts)
    kept = engine.start(0, 50, 10, group="b/kept")
    size = drafts._groups.nbytes
    for turn in range(3 * 2**20 // size):
        engine.end(engine.start(0, 50, 10, group=f"b/{turn}"))
    assert drafts._groups.nbytes < 2 * 2**20
    assert kept in engine.requests and engine.step() is not None
    drafts.stop()


def test_histories_of_idle_groups_count_as_memory_and_the_group_used_last_stays():
    """Three of them are more than 1 MiB; the group that was opened first is used last."""
    groups = GroupIndexes(DraftConfig(method="group", index_mib=1), None, 1 << 20)
    past = [PastAnswer("key", 0, 0, None, np.arange(8_000, dtype=np.int32))]
    used = []
    for name in ("first", "second", "third"):
        used.append(groups.open(GroupRef(name, "key"), 1, PROMPT))
        groups._build(used[-1], past)
    groups.settle()
    assert all(group.index.whole_nbytes > 300_000 > group.index.nbytes for group in used) and groups.nbytes > 2**20
    for group in reversed(used):
        groups.close(group)
    groups.open(GroupRef("another", "key"), 1, PROMPT)
    assert GroupRef("first", "key") in groups._idle and GroupRef("third", "key") not in groups._idle
    assert groups.nbytes <= 2**20 + 100_000
    groups.close_all()


class Late:
    """A feed that brings tokens of a group once nothing of it runs any more."""

    def __init__(self, *late: Piece):
        self._late = list(late)

    def take(self) -> list[Fetched]:
        late, self._late = self._late, []
        return [Fetched(piece.group, [piece], []) for piece in late]

    def hold(self, *_):
        pass

    rest = release = hold


def test_sizes_of_idle_groups_are_counted_once_and_again_if_they_have_grown(monkeypatch):
    """There can be 100,000 of them: reading each one's size took a quarter of a second of the engine's thread."""
    refs = [GroupRef(f"b/{number}", "key") for number in range(12)]
    feed = Late(Piece(refs[0], 3, 0, np.arange(9_000, dtype=np.int32)))
    groups = GroupIndexes(DraftConfig(method="group", index_mib=1), feed, 1 << 20)
    for ref in refs:
        groups.close(groups.open(ref, 0, PROMPT))
    few = groups.nbytes
    groups.receive()
    every = [group.index for group in groups._idle.values()]
    assert groups.nbytes == sum(index.whole_nbytes for index in every) > few + 100_000
    assert groups.tokens == sum(index.tokens for index in every) == 12 * len(PROMPT) + 9_000
    read = []
    monkeypatch.setattr(GroupIndex, "whole_nbytes", property(lambda index: read.append(index) or 40_000))
    again = groups.open(refs[0], 0, PROMPT)
    groups.open(GroupRef("b/new", "key"), 0, PROMPT)
    groups.close(again)
    assert groups.nbytes and groups.tokens and len(read) < 6
    groups.close_all()


def test_a_chunk_without_a_plan_does_not_draft(drafts):
    drafts.open(ChunkRequest("c", 0, PROMPT, len(PROMPT), 4, SamplingParams(), 0), Request(len(PROMPT)))
    drafts.made_by([("c", [1])])
    drafts.propose()
    assert drafts.close("c") is None


def test_what_a_lost_chunk_had_made_is_drafted_for_the_one_that_follows_it(drafts):
    engine = Engine(drafts)
    lost = engine.start(0, 0, 60)
    for _ in range(20):
        engine.step()
    engine.end(lost)
    again = engine.start(0, 10, 50)
    engine.step()
    verified = engine.step()[again]
    assert verified == ANSWER[11:19]


@pytest.mark.parametrize("answer", [ANSWER[::-1], ANSWER[:7] + ANSWER[:6:-1]])
def test_what_an_earlier_run_under_the_same_names_had_made_is_left_where_it_differs(drafts, answer, monkeypatch):
    """A driver that runs again under other weights: the index of its group may still be here."""
    engine = Engine(drafts, Goodput())
    engine.start(0, 0, 60)
    while engine.requests:
        engine.step()
    monkeypatch.setitem(globals(), "ANSWER", answer)
    mate = engine.start(1, 0, 60)
    while engine.requests:
        engine.step()
    again = engine.start(0, 0, 60)
    verified = [engine.step()[again] for _ in range(20) if again in engine.requests]
    assert mate not in engine.requests and len(verified) < 18, "the mate has written the same"
    assert drafts._groups.open(GroupRef("b/p", "key"), 0, PROMPT).index.ahead(0, 0, 60).tolist() == answer


def test_what_a_lost_chunk_had_made_is_drafted(drafts):
    engine = Engine(drafts, Goodput())
    chunk_id = engine.start(0, 0, 60)
    engine.step()
    drafted = drafts._running[chunk_id]
    drafts._read_all([drafted])
    drafted.group.index.extend(0, 1, ANSWER[1:6])
    engine.step()
    assert engine.step()[chunk_id][:4] == ANSWER[2:6]


class History:
    """A feed that delivers earlier answers once."""

    def __init__(self, *answers: list[int]):
        self._answers = [PastAnswer("key", -1, 0, None, np.array(tokens, np.int32)) for tokens in answers]

    def hold(self, group):
        self._group = group

    def take(self):
        answers, self._answers = self._answers, []
        return [Fetched(self._group, [], answers)] if answers else []

    def append(self, *_):
        pass

    def rest(self, *_):
        pass


@pytest.mark.parametrize(("foreign", "drafted"), [([2_000_000_000], False), ([60_000], False), ([1500], True)])
def test_answers_of_another_model_are_no_drafts(foreign, drafted):
    """A draft token outside the vocabulary would end the engine in its next step."""
    past = ANSWER[:6] + foreign + ANSWER[6:]
    drafts = EngineDrafts(DraftConfig(method="group", draft_tokens=16), 4096, History(past), None, vocabulary=50_000)
    engine = Engine(drafts)
    engine.start(0, 4, 40)
    drafts._groups.settle()
    seen = {token for _ in range(4) for tokens in engine.step().values() for token in tokens}
    assert not (seen & {2_000_000_000, 60_000})
    assert (1500 in seen) == drafted and drafts._groups.foreign_answers == (not drafted)


class Asked(Goodput):
    """The policy, and the number of samples that had a proposal, each time that it was asked."""

    asked: ClassVar[list[int]] = []

    def decide(self, view, memory):
        self.asked.append(int((view.proposed > 0).sum()))
        return super().decide(view, memory)


def crowd(count: int, step_s: float, dear_s: float) -> tuple[EngineDrafts, dict[int, Request]]:
    """Drafts of `count` samples of a group. A step of them takes `step_s`, one of twice the tokens `dear_s`."""
    drafts, requests = EngineDrafts(DraftConfig(method="group", draft_tokens=8), 4096, None), {}
    for tokens, seconds in ((count, step_s), (2 * count, dear_s)):
        for _ in range(16):
            drafts.performance.steps.record(tokens, seconds)
    for sample in range(count):
        plan = DraftPlan(GroupRef("b/p", "key"), sample, 0, 600, (0, 0), Asked())
        chunk = ChunkRequest(f"c{sample}", 0, PROMPT, len(PROMPT), 600, SamplingParams(), 0, draft=plan)
        requests[sample] = Request(len(PROMPT))
        drafts.open(chunk, requests[sample])
    Asked.asked.clear()
    return drafts, requests


def write(drafts: EngineDrafts, requests: dict[int, Request], text: Callable[[int, int], int], steps: int) -> int:
    """Steps in which sample i writes text(i, position), more where its draft is right. Returns the tokens drafted."""
    drafted = 0
    for _ in range(steps):
        made = []
        for sample, request in requests.items():
            at, draft = request.num_tokens - len(PROMPT), request.spec_token_ids
            rest = [text(sample, place) for place in range(at, at + len(draft) + 1)]
            made.append((f"c{sample}", rest[: accepted_tokens(draft, rest) + 1]))
            request.num_tokens, request.spec_token_ids = request.num_tokens + len(made[-1][1]), []
            drafted += len(draft)
        drafts.made_by(made)
        drafts.propose()
    return drafted


def noise(sample: int, place: int) -> int:
    """One of eight tokens, so that something like it was always written, and never tells what follows."""
    return 100 + (sample * 7919 + place * place * 104729 + sample * place * 1299709) % 1013 % 8


def test_drafts_that_do_not_pay_are_looked_for_as_their_time_allows():
    drafts, requests = crowd(16, 0.001, 0.1)
    assert write(drafts, requests, noise, 40) == 0
    assert len(Asked.asked) == 6, "after the first step, then after every eighth"
    drafts.stop()
    drafts, requests = crowd(16, 1.0, 100.0)
    assert write(drafts, requests, noise, 40) == 0
    assert len(Asked.asked) == 40, "a step of a second can spare the time"
    drafts.stop()
    drafts, requests = crowd(64, 1.0, 100.0)
    assert write(drafts, requests, noise, 40) == 0
    assert len(Asked.asked) == 21, "more than a millisecond for 64 samples: after the first step, then every second"
    drafts.stop()
    drafts, requests = crowd(8, 0.001, 0.1)
    write(drafts, requests, noise, 40)
    assert len(Asked.asked) == 40, "few samples are drafted for after every step"
    drafts.stop()


@pytest.mark.parametrize(("tested_ago_s", "drafts_again"), [(1.0, False), (3_600.0, True)])
def test_aimd_drafts_again_some_time_after_its_drafts_were_wrong(drafts, tested_ago_s, drafts_again):
    """While it does not draft, nothing is tested."""
    engine = Engine(drafts, Aimd())
    drafts.performance.acceptance.count("group", 0, 2_000, time.monotonic() - tested_ago_s)
    engine.start(0, 0, 60)
    drafts._running["b/p#0:0"].group.index.extend(1, 0, ANSWER)
    assert any(tokens for _ in range(8) for tokens in engine.step().values()) == drafts_again


def test_a_sample_whose_drafts_pay_is_drafted_for_after_every_step():
    """Half of the samples say the same 20 tokens again and again; the others say what nobody has said."""

    def text(sample: int, place: int) -> int:
        return ANSWER[place % 20] if sample < 8 else 10_000 + sample * 1_000 + place

    drafts, requests = crowd(16, 0.001, 0.00101)
    assert write(drafts, requests, text, 40) > 16 * 8
    tokens = [request.num_tokens - len(PROMPT) for request in requests.values()]
    assert min(tokens[:8]) > 60 and tokens[8:] == [40] * 8
    assert Asked.asked == [0] * 3 + [8] * 17, "after steps 1, 8 and 16, and after each from 24 on"
    report = drafts.close("c0")
    assert report.verifications == 40 and report.accepted.sum() == tokens[0] - 40
    drafts.stop()


def test_tokens_that_no_draft_was_looked_for_after_are_known_when_their_chunk_ends():
    drafts, requests = crowd(16, 0.001, 0.1)
    write(drafts, requests, lambda sample, place: ANSWER[place], 13)
    chunk = ChunkRequest(
        "copy", 0, PROMPT, len(PROMPT), 60, SamplingParams(), 0,
        draft=DraftPlan(GroupRef("b/p", "key"), 3, 0, 60, (0, 0), FIXED),
    )  # fmt: skip
    drafts.close("c3")
    request = Request(len(PROMPT))
    drafts.open(chunk, request)
    drafts.made_by([("copy", ANSWER[:1])])
    drafts.propose()
    assert request.spec_token_ids == ANSWER[1:9], "of all thirteen tokens that the chunk before it has made"
    drafts.stop()


def test_a_proposal_beside_a_step_that_computes_already_sets_no_draft():
    """The step's token is not known yet: a draft would continue the one before it."""
    drafts = EngineDrafts(DraftConfig(method="group"), 4096, None)
    engine = Engine(drafts)
    engine.start(0, 40, 20)
    name = engine.start(1, 0, 60)
    request, _ = engine.requests[name]
    drafts.made_by([(name, ANSWER[:1])])
    assert drafts.propose({}) and not request.spec_token_ids
    request.num_tokens += 2
    drafts.made_by([(name, ANSWER[1:2])])
    assert drafts.propose() and request.spec_token_ids == ANSWER[2:10]
