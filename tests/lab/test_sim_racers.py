"""Who races in a simulation: rungs from a paper's tables, room for copies, and what copies cost racing other chunks."""

import pytest
from test_sim_decoupled import STEP, Even, chunks, method

from tailrace.lab.simulator.decoupled import DraftSetup, Odds
from tailrace.lab.simulator.hardware import replica_model
from tailrace.lab.simulator.race_methods import RACE_SHARE, RacingSpeculation, mean_chance, race_methods_of, verifier_of
from tailrace.lab.simulator.scenario import load_scenario
from tailrace.lab.simulator.speculation import PlainDecoding, by_policy
from tailrace.policies.families.registry import load_policy
from tailrace.policies.models.spec_cost_model import DrafterCost, coupled_tokens_s

SCENARIO = load_scenario("dapo-32b")
MODEL = replica_model("H800", "Qwen2.5-32B", 4)
EVEN = Odds(0, spread=0.0)


@pytest.mark.parametrize(
    ("own", "ahead", "copies"),
    [
        ("draft-0.5b", True, {"index", "draft-1.5b"}),
        (None, True, {"index", "draft-0.5b", "draft-1.5b"}),
        (None, False, {"index"}),  # a draft model in turn takes 3 ms a token, a step 11 ms
        ("index", False, {"draft-0.5b", "draft-1.5b"}),  # on idle replicas
    ],
)
def test_copies_keep_steps_short_or_have_a_replica_of_their_own(own, ahead, copies):
    found = race_methods_of(SCENARIO, MODEL, own, ahead=ahead)
    policy, verifier = found.policy, verifier_of(SCENARIO, MODEL)
    assert set(found.ways) == copies and {rung.method for rung in policy.rungs} == copies | {found.own}
    assert not any(way.ahead for way in found.ways.values()) or ahead
    for way in found.ways.values():
        draft_s = 0.0 if ahead else way.window * way.method.draft_s(policy.room)
        copies_s = policy.room * (1 + way.window) * verifier.token_s + draft_s
        assert policy.room == 1 or copies_s <= RACE_SHARE * verifier.base_s
    longest = SCENARIO.prompt_tokens.value + SCENARIO.max_tokens.value
    assert policy.room * longest <= MODEL.kv_capacity_tokens
    assert (policy.room == 1) == (own == "index")


def test_a_rung_goes_by_the_chance_of_a_tested_draft():
    """A sample whose chance is the mean's is as fast as its best window makes it."""
    small = next(one for one in SCENARIO.drafting() if one.name == "draft-0.5b")
    found, verifier, p = (
        race_methods_of(SCENARIO, MODEL, "index", ahead=False),
        verifier_of(SCENARIO, MODEL),
        mean_chance(small),
    )
    rung = next(rung for rung in found.policy.rungs if rung.method == small.name)
    assert rung.profile == (p,)
    best = max(coupled_tokens_s(p, DrafterCost(1, small.token_s, small.base_s), verifier, 1, w) for w in range(17))
    assert rung.speedup(p) == pytest.approx(best * verifier.seconds(1, 0), rel=0.02)


def test_more_mates_are_more_acceptance_of_the_index_alone():
    alone, among = (race_methods_of(SCENARIO, MODEL, "index", mates=mates, ahead=False).policy for mates in (0, 15))
    assert among.usual > alone.usual
    assert [rung.profile for rung in among.rungs[1:]] == [rung.profile for rung in alone.rungs[1:]]


def test_copies_make_what_their_method_says_and_each_model_adds_its_drafts():
    ways = {"one": DraftSetup(method(0.5, "one"), 3, False), "two": DraftSetup(method(0.8, "two"), 2, False)}
    running = chunks(4)
    running[1].method, running[2].method, running[3].method = "one", "two", "two"
    pace = RacingSpeculation(PlainDecoding(), "index", ways, EVEN).pace(running, 400.0)
    assert pace.rates == pytest.approx([1.0, 1 + 0.5 + 0.25 + 0.125, 1 + 0.8 + 0.64, 1 + 0.8 + 0.64])
    assert pace.costs == pytest.approx([1.0, 4.0, 3.0, 3.0])
    assert pace.added_s == pytest.approx(3 * (0.003 + 1e-5) + 2 * (0.003 + 2e-5)), "one model after the other"
    alone = RacingSpeculation(PlainDecoding(), "index", ways, EVEN).pace(running[1:2], 100.0)
    assert alone.rates == pace.rates[1:2] and alone.added_s == pytest.approx(3 * (0.003 + 1e-5))


def test_other_chunks_draft_as_they_would_without_copies():
    own = by_policy(load_policy("drafting", {"type": "fixed", "tokens": 3}), Even(0.6), STEP, 0)
    ways = {"one": DraftSetup(method(0.5, "one"), 2, False)}
    racing, plain = RacingSpeculation(own(0), "index", ways, EVEN), own(0)
    running = chunks(3)
    running[1].method = "one"
    with_copy = racing.pace(running, 300.0)
    same = chunks(3)
    without = plain.pace([same[0], same[2]], 200.0)
    assert [with_copy.rates[0], with_copy.rates[2]] == without.rates
    assert [with_copy.costs[0], with_copy.costs[2]] == without.costs
    assert racing.most == 3 and racing.stale(1, 3) and not racing.stale(1, 99)
    for chunk in running:
        racing.drop(chunk)
    assert all(chunk.slot == -1 for chunk in running)


def test_a_replica_s_model_is_the_verifier_at_a_mean_context():
    verifier = verifier_of(SCENARIO, MODEL)
    assert verifier.gpus == MODEL.gpus
    context = SCENARIO.prompt_tokens.value + SCENARIO.law().mean() / 2
    assert verifier.seconds(3, 0) == pytest.approx(MODEL.step.seconds(3, 3 * context))
