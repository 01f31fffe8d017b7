"""vLLM's own drafter beside the index: what it proposes, how that is counted, and when it runs. The engine here models
one: samples that write an answer, and a drafter that proposes its next tokens, some of them wrong.
"""

import numpy as np
import pytest
from test_drafts import PROMPT, Request

from tailrace.deployments.draft_index.proposal import Proposal, accepted_tokens
from tailrace.deployments.drafting import vllm_proposals
from tailrace.deployments.drafting.drafts import EngineDrafts
from tailrace.deployments.drafting.proposal_batch import ProposalBatch
from tailrace.deployments.drafting.vllm_proposals import FIRST_MEASURE, LOOK, MEASURE, ON_DEVICE, TRIAL
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import GroupRef, Source
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.policies.families.drafting import FixedBudget, NoDrafting
from tailrace.policies.families.goodput import Goodput
from tailrace.policies.protocol.draft_methods import DraftMethod

LENGTH = 3
WRONG = 7
BASE_S, TOKEN_S = 0.01, 0.0001


class Engine:
    """`right`: how many tokens of a proposal are. `on_device`: the host does not see them. `drafter_s`: of a step in
    which it proposes.
    """

    def __init__(self, method: str = "vllm", policy=FixedBudget(tokens=8), samples: int = 2, on_device: bool = False):  # noqa: B008
        self.switched: list[int] = []
        self.right, self.on_device, self.drafter_s = LENGTH, on_device, 0.0
        config = DraftConfig(method=method, draft_tokens=6)
        of_vllm = vllm_proposals.VllmProposals(LENGTH, self.switched.append, on_device)
        self.drafts = EngineDrafts(config, 1 << 20, None, vllm=of_vllm)
        for tokens in (1, 16, 64):
            self.drafts.performance.steps.record(tokens, BASE_S + TOKEN_S * tokens)
        self.requests, self.proposed = {}, {}
        self.in_flight, self.length, self.waits = None, 0, False  # drafts and places of the step in flight
        for number in range(samples):
            self.start(number, policy)

    def start(self, number: int, policy, method: str | None = None, tokens: int = 1 << 16) -> None:
        plan = DraftPlan(GroupRef(f"b/{number}", "key"), number, 0, 60, (0, 0), policy, method=method)
        chunk = ChunkRequest(f"c{number}", 0, PROMPT, len(PROMPT), tokens, SamplingParams(), 0, draft=plan)
        self.requests[chunk.chunk_id] = Request(len(PROMPT), request_id=chunk.chunk_id)
        self.drafts.open(chunk, self.requests[chunk.chunk_id])

    @staticmethod
    def answer(number: str, at: int, count: int) -> list[int]:
        """Tokens of a sample that repeats nothing."""
        return [1000 + 100_000 * int(number[1:]) + at + i for i in range(count)]

    def step(self, ahead: bool = False) -> dict[str, list[int]]:
        """A step of every sample. Returns the drafts that it verified. `ahead`: the next one is scheduled before its
        tokens are taken.
        """
        verified = self.in_flight or {name: request.spec_token_ids for name, request in self.requests.items()}
        length, self.length = self.length if self.in_flight else self.switched[-1], self.switched[-1]
        made = []
        for name, request in self.requests.items():
            at, draft = request.num_tokens - len(PROMPT), verified[name]
            tested = self.proposed.get(name, []) if draft[:1] == [ON_DEVICE] else draft
            coming = self.answer(name, at, 8)
            tokens = coming[: accepted_tokens(tested[: len(draft)], coming) + 1]
            request.num_tokens += len(tokens)
            made.append((name, tokens))
            after = at + len(tokens)
            self.proposed[name] = (self.answer(name, after, self.right) + [WRONG] * LENGTH)[:length]
            request.spec_token_ids = [ON_DEVICE] * length if self.on_device else list(self.proposed[name])
        self.in_flight = {name: request.spec_token_ids for name, request in self.requests.items()} if ahead else None
        tokens = self.tokens = sum(len(draft) for draft in verified.values()) + len(verified)
        took_s = BASE_S + TOKEN_S * tokens + (self.drafter_s if length else 0.0)
        self.own_s = self.drafts.vllm.step(took_s, len(made), tokens, length > 0)
        self.drafts.made_by(made)
        self.waits = self.drafts.propose(self.in_flight)
        return verified

    def run(self, steps: int) -> list[dict[str, list[int]]]:
        """Steps, each of which runs ahead if the one before allows it. Returns the drafts that each verified."""
        return [self.step(ahead=not self.waits) for _ in range(steps)]

    def knows(self, name: str) -> None:
        """Adds a mate of this sample that has written its answer."""
        context, number = np.array([*PROMPT, *self.answer(name, 0, 400)], np.int32), name[1:]
        plan = DraftPlan(GroupRef(f"b/{number}", "key"), 99, 0, 60, (0, 0), FixedBudget(tokens=8))
        mate = ChunkRequest(f"mate {name}", 0, context, len(PROMPT), 9, SamplingParams(), 0, draft=plan)
        policy = self.drafts._policy
        self.drafts.open(mate, Request(len(context)))
        self.drafts._policy = policy

    @property
    def acceptance(self) -> float:
        return self.drafts.performance.acceptance.chance(DraftMethod.VLLM)

    @property
    def on(self) -> bool:
        return self.switched[-1] > 0


@pytest.mark.parametrize("on_device", [False, True])
def test_right_proposals_are_verified_and_counted(on_device):
    engine = Engine(on_device=on_device)
    assert engine.drafts.methods == ("vllm",) and engine.switched == [0]
    engine.step()
    assert engine.switched == [0, LENGTH]
    engine.step()
    for _ in range(5):
        assert [len(draft) for draft in engine.step().values()] == [LENGTH, LENGTH]
    engine.right = 1
    for _ in range(4):
        engine.step()
    report = engine.drafts.close("c0")
    # Five of the first proposals, and the one made before the change, were right; three had one right token.
    assert (report.verifications, report.drafted.sum(), report.accepted.sum()) == (11, 9 * LENGTH, 6 * LENGTH + 3)
    assert report.tested == 6 * LENGTH + 3 * 2 and report.accepted_at.tolist() == [9, 6, 6, 0, 0, 0]
    assert engine.drafts.counts()["accepted.vllm"] == 6 * LENGTH + 3
    (one,) = engine.drafts.performance.acceptance.report()
    assert one.method == "vllm" and one.tested > one.right > 30
    engine.drafts.stop()


def test_the_index_and_the_drafter_draft_beside_each_other():
    """Each sample drafts by whoever is expected to be right; a proposal that the index overtook is measured, too."""
    engine, fixed = Engine("group", samples=0), FixedBudget(tokens=8)
    assert engine.drafts.methods == ("group", "history", "ngram", "vllm")
    known = DraftPlan(GroupRef("b/1", "key"), 5, 0, 60, (0, 0), fixed)
    context = np.array([*PROMPT, *Engine.answer("c1", 0, 200)], np.int32)
    mate = ChunkRequest("mate", 0, context, len(PROMPT), 9, SamplingParams(), 0, draft=known)
    engine.drafts.open(mate, Request(len(context)))
    engine.start(1, fixed)
    engine.start(2, fixed)
    engine.right = 1
    drafted = [engine.step() for _ in range(12)]
    assert len(drafted[-1]["c1"]) == 6 and len(drafted[-1]["c2"]) == LENGTH
    counts = engine.drafts.close("c1"), engine.drafts.close("c2")
    assert counts[0].accepted[1] > 40 and counts[1].accepted[5] == counts[1].verifications - 2 == 10
    assert engine.acceptance == pytest.approx(0.5, abs=0.05), "one token right, then one wrong, of both samples"
    engine.drafts.stop()


def test_a_proposal_on_the_device_that_is_not_verified_is_not_counted():
    engine = Engine(samples=0, on_device=True)
    engine.start(1, FixedBudget(tokens=8), method="history")
    engine.start(2, FixedBudget(tokens=8))
    drafted = [engine.step() for _ in range(5)][-1]
    assert not drafted["c1"], "it drafts by its own method"
    assert drafted["c2"] == [ON_DEVICE] * LENGTH
    assert [one.tested for one in engine.drafts.performance.acceptance.report()] == pytest.approx([9], abs=0.5)
    engine.drafts.stop()


@pytest.mark.parametrize("on_device", [False, True])
def test_the_last_token_of_a_chunk_may_be_a_draft_on_the_device(on_device):
    """Nothing follows it, so the records know that it was a draft, and the counts of a step do not."""
    engine = Engine(on_device=on_device)
    for _ in range(4):
        engine.step()
    counted = 2 * LENGTH
    assert engine.drafts.close("c1", accepted=counted).accepted.sum() == counted
    engine.right = 1
    for _ in range(2):
        engine.step()
    counted += LENGTH + 1
    report = engine.drafts.close("c0", accepted=counted + 1)
    assert report.accepted.sum() == report.accepted_at.sum() == counted + on_device
    engine.drafts.stop()


def test_no_proposal_reaches_behind_its_chunk():
    engine = Engine(samples=0)
    engine.start(1, FixedBudget(tokens=8), tokens=3)
    engine.step()
    engine.step()
    assert engine.requests["c1"].spec_token_ids == [], "its last token is the one after the drafts"
    engine.drafts.stop()


def test_a_policy_that_drafts_nothing_lets_it_rest():
    engine = Engine()
    for _ in range(3):
        engine.step()
    assert engine.on
    for name in ("c0", "c1"):
        engine.drafts.close(name)
    engine.requests.clear()
    engine.start(3, NoDrafting())
    engine.step()
    assert not engine.on and not engine.waits and engine.requests["c3"].spec_token_ids == []
    engine.drafts.stop()


def test_one_that_is_mostly_wrong_stops_and_is_tried_again():
    engine = Engine(policy=Goodput())
    engine.right = 0
    for _ in range(100):
        engine.step()
    assert not engine.on and engine.acceptance < 0.2
    ran = trials = 0
    for _ in range(3 * TRIAL):
        engine.step()
        ran, trials = ran + engine.on, trials + engine.drafts.vllm.trial
    assert 1 <= trials <= 3 and ran <= 12, "each trial is one step"
    engine.right = LENGTH
    for _ in range(2 * TRIAL + 100):
        engine.step()
    assert engine.on and engine.acceptance > 0.9
    engine.drafts.stop()


@pytest.mark.parametrize(("drafter_s", "stays"), [(BASE_S / 4, True), (20 * BASE_S, False)])
def test_its_seconds_are_measured_and_weighed(drafter_s, stays):
    engine = Engine(policy=Goodput())
    engine.drafter_s = drafter_s
    for _ in range(FIRST_MEASURE + LOOK):
        engine.step()
    assert engine.drafts.vllm._seconds == pytest.approx(drafter_s)
    assert engine.on == stays
    changes = len(engine.switched)
    cost_s = float(engine.drafts.performance.steps.cost(2).at(8))
    for _ in range(2 * MEASURE + 10):
        engine.step()
        assert engine.own_s == pytest.approx(BASE_S + TOKEN_S * engine.tokens), "the cost of steps is that without it"
    assert float(engine.drafts.performance.steps.cost(2).at(8)) == pytest.approx(cost_s)
    assert len(engine.switched) - changes == (4 if stays else 0), "off for one step, twice"
    engine.drafts.stop()


def test_steps_of_other_sizes_measure_nothing():
    proposals = vllm_proposals.VllmProposals(LENGTH, [].append)
    for samples, tokens in ((3, 8), (2, 40)):
        assert proposals.step(0.5, 2, 8, ran=True) == 0.5
        proposals.step(0.1, samples, tokens, ran=False)
        assert proposals._seconds == 0.0
    proposals.on = True
    proposals.step(0.5, 2, 8, ran=None)
    proposals.on = False
    assert proposals.step(0.1, 2, 9, ran=None) == 0.1
    assert proposals._seconds == pytest.approx(0.4)


@pytest.mark.parametrize("policy", [Goodput(), FixedBudget(tokens=8)])
def test_steps_run_ahead_of_proposals_that_are_verified_whole(policy):
    engine = Engine(policy=policy, on_device=True)
    drafted = engine.run(40)
    assert engine.on and not engine.waits
    assert all(len(draft) == LENGTH for draft in drafted[5].values())
    lengths = {len(draft) for each in drafted[5:] for draft in each.values()}
    assert lengths == ({0, LENGTH} if policy.by_worth else {LENGTH}), "a step without them, which measures"
    report = engine.drafts.close("c0")
    verified = sum(len(each["c0"]) for each in drafted)
    assert report.drafted.sum() == report.drafted[Source.VLLM] == report.accepted.sum() == verified > 90
    assert engine.acceptance > 0.9
    engine.drafts.stop()


def test_no_step_runs_ahead_of_proposals_where_the_policy_takes_less_or_the_index_drafts():
    """Of a policy that does not weigh costs."""
    less, index = (Engine(name, FixedBudget(tokens=most), on_device=True) for name, most in (("vllm", 2), ("group", 8)))
    index.knows("c0")
    for engine in (less, index):
        engine.run(3)
        for _ in range(5):
            engine.run(1)
            assert engine.on and engine.waits and engine.in_flight is None
        engine.drafts.stop()


@pytest.mark.parametrize(("samples", "known", "waits"), [(12, 1, False), (12, 6, True), (2, 1, True)])
def test_steps_wait_for_the_index_where_it_brings_more_than_waiting_costs(samples, known, waits):
    engine = Engine("group", Goodput(), samples, on_device=True)
    for number in range(known):
        engine.knows(f"c{number}")
    drafted = engine.run(20)[-1]
    assert engine.on and engine.waits == waits
    wanted = {name: 6 if waits and int(name[1:]) < known else LENGTH for name in engine.requests}
    assert {name: len(draft) for name, draft in drafted.items()} == wanted
    engine.drafts.stop()


def test_an_engine_whose_steps_never_run_ahead_verifies_what_the_policy_chose():
    engine = Engine("group", Goodput(), samples=12)
    engine.knows("c3")
    assert [len(draft) for draft in [engine.step() for _ in range(20)][-1].values()] == [3, 3, 3, 6, *[3] * 8]
    engine.drafts.stop()


def test_the_drafter_is_measured_and_stops_beside_steps_that_run_ahead():
    engine = Engine(policy=Goodput(), on_device=True)
    engine.drafter_s = BASE_S / 4
    engine.run(FIRST_MEASURE + LOOK + MEASURE)
    assert engine.on and not engine.waits
    assert engine.drafts.vllm._seconds == pytest.approx(engine.drafter_s)
    engine.right = 0
    steps = off = 0
    while off < 5 and steps < 1000:  # its samples have been right until now
        engine.run(1)
        steps, off = steps + 1, 0 if engine.on else off + 1
    assert not engine.on and not engine.waits
    assert engine.run(3) == 3 * [{"c0": [], "c1": []}] and engine.drafts.propose({}) is False
    engine.drafts.stop()


@pytest.mark.parametrize("ran", [False, True])
def test_each_draft_is_counted_once_where_steps_wait_again(ran, monkeypatch):
    """A step in flight has drafts, and nothing is proposed after it: the drafter was switched off meanwhile, with the
    step after it (`ran`) or before.
    """
    engine = Engine(policy=Goodput(), on_device=True)
    drafted = engine.run(8)
    assert all(engine.in_flight.values())
    monkeypatch.setattr(engine.drafts, "_is_due", lambda *_: False)
    engine.drafts.vllm.on, engine.length = False, LENGTH if ran else 0
    engine.switched.append(0)
    for running in engine.drafts._running.values():
        running.futile = True
    drafted += [engine.step() for _ in range(4)]
    for name in engine.requests:
        report = engine.drafts.close(name)
        assert report.drafted.sum() == report.accepted.sum() == sum(len(each[name]) for each in drafted)
    engine.drafts.stop()


def test_it_does_not_wait_where_it_would_not_pay():
    engine = Engine(policy=Goodput(), samples=64, on_device=True)
    for tokens in (64, 128, 256):
        for _ in range(50):
            engine.drafts.performance.steps.record(tokens, BASE_S * tokens)
    for _ in range(20):
        engine.step(ahead=True)
        assert not engine.waits and not engine.on
    engine.drafts.stop()


@pytest.mark.parametrize("seed", range(20))
def test_proposals_are_joined_as_those_of_a_draft_model(seed):
    """Row by row the path of most expected tokens through the tree of both; common tokens keep their source."""
    rng = np.random.default_rng(seed)
    count, most, length = 12, 5, 3
    batch, wanted = ProposalBatch(count, most), []
    tokens, right = np.full((count, length), vllm_proposals.NO_TOKEN, np.int32), np.zeros((count, length), np.float32)
    for row in range(count):
        sizes = rng.integers(0, most + 1), rng.integers(0, length + 1)
        ours, other = (
            Proposal(
                tokens=rng.integers(0, 3, size).astype(np.int32),
                right=rng.uniform(0.05, 1, size).astype(np.float32),
                sources=np.full(size, source, np.uint8),
                match_tokens=0,
            )
            for size, source in zip(sizes, (Source.MATE, Source.VLLM), strict=True)
        )
        batch.put(row, ours)
        tokens[row, : sizes[1]], right[row, : sizes[1]] = other.tokens, other.right
        wanted.append(ours.joined(other))
    batch.join(np.arange(count), tokens, right, Source.VLLM)
    for row, one in enumerate(wanted):
        found = batch.get(row)
        assert found.tokens.tolist() == one.tokens.tolist() and found.sources.tolist() == one.sources.tolist()
        np.testing.assert_allclose(found.right, one.right)
        assert not batch.right[row, len(one.tokens) :].any()
