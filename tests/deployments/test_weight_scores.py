"""A replica whose weights score unlike the others', or unlike the trainer's, is found, named and not used."""

import asyncio
import logging
from dataclasses import replace

import pytest
from test_weights_book import Engines, at_once, report, settle

from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.weight_scores import WeightScores
from tailrace.deployments.coordinator.weights import Weights
from tailrace.deployments.messages.rollout import Rejected
from tailrace.deployments.messages.scores import BROKEN, SCORED, TOLERANCE, apart
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.events import ReplicaJoined, ReplicaLeft

SOUND = tuple(-1.0 - place / 8 for place in range(len(SCORED) - 1))


def scored(name: str, by: float = 0.0, **values):
    return replace(report(name), score=tuple(one - by for one in SOUND), **values)


def seen(reports, exactness="bits", trainers=()) -> WeightScores:
    scores = WeightScores(lambda: exactness)
    scores.observe(reports)
    scores.believe(trainers)
    return scores


@pytest.mark.parametrize(("exactness", "by", "aside"), [
    ("bits", 1e-6, True), ("law", TOLERANCE / 2, False), ("law", TOLERANCE * 2, True), ("law", -BROKEN, True),
])  # fmt: skip
def test_the_one_that_differs_from_most_is_set_aside_and_named(exactness, by, aside, caplog):
    scores = seen([scored("a"), scored("b", by), scored("c")], exactness)
    assert set(scores.unlike) == ({"b"} if aside else set())
    assert [one.levelno for one in caplog.records if "b: the score of its weights" in one.message] == (
        [logging.ERROR] if aside else []
    )


def test_of_two_that_differ_none_is_set_aside_and_both_are_named():
    scores = seen([scored("a"), scored("b", 1.0)])
    assert not scores.unlike and set(scores.found) == {"a", "b"}
    scores.observe([scored("a"), scored("b", 1.0), scored("c")])
    assert set(scores.unlike) == {"b"} and not scores.found, "a third one decides"


def test_a_replica_alone_is_compared_with_itself():
    scores = seen([scored("a")])
    assert not scores.unlike and not scores.found
    scores.observe([scored("a", 1.0)])
    assert set(scores.unlike) == {"a"}, "it has changed under the same weights, by a wake-up for example"


def test_the_first_scores_of_replicas_that_left_count():
    scores = seen([scored("a"), scored("b")])
    scores.observe([scored("c", 1.0)])
    assert set(scores.unlike) == {"c"}


def test_the_trainer_is_believed_within_a_tolerance():
    near = tuple(one + TOLERANCE / 2 for one in SOUND)
    assert not seen([scored("a"), scored("b")], trainers=near).unlike
    assert set(seen([scored("a", 1.0), scored("b", 1.0)], trainers=near).unlike) == {"a", "b"}
    assert set(seen([scored("a"), scored("b", 1.0)], trainers=near).unlike) == {"b"}, "two are enough then"


def test_weights_that_changed_before_they_were_replaced_are_named():
    scores = seen([scored("a"), scored("b", score_drift=0.5)])
    assert scores.found == {"b": "its former weights had changed in place, by 0.5 nats"} and not scores.unlike


def test_scores_of_other_lengths_have_no_distance():
    assert apart(SOUND, SOUND[:-1]) == float("inf") and apart(SOUND, SOUND) == 0.0
    assert not seen([scored("a"), replace(scored("b"), score=SOUND[:3])]).unlike, "no majority"


class ScoredEngines(Engines):
    """`unsound`: replicas whose weights differ from their source, until they have loaded it so many times again."""

    def __init__(self, *replicas: str):
        super().__init__(*replicas)
        self.unsound: dict[str, int] = {}

    async def ask(self, name, command):
        await super().ask(name, command)
        if not command.digest and name in self.unsound:
            self.unsound[name] -= 1

    def reports(self):
        return [
            replace(one, score=scored("", float(self.unsound.get(one.replica_id, 0) > 0)).score)
            for one in super().reports()
        ]


def run(scenario, *replicas: str) -> None:
    engines = ScoredEngines(*replicas)
    asyncio.run(asyncio.wait_for(scenario(Weights(engines, at_once), engines), 60.0))


def test_an_update_names_the_replica_that_is_set_aside_and_has_it_load_again():
    async def scenario(weights, engines):
        registry = ReplicaRegistry()

        def events():
            heard = [(weights.known(one), 0.0) for one in engines.reports()]
            return registry.observe(heard, 0.0, weights.scores.unlike)

        engines.folders["w1"] = "one"
        await settle(weights, engines)
        events()
        engines.unsound["b"] = 1
        assert await weights.want(1, "w1") is None
        for load in weights.loads(0.0):
            await load
        weights.observe(engines.reports())
        loaded = await weights.loaded()
        assert loaded.replicas == ("a", "c") and set(loaded.set_aside) == {"b"} and set(loaded.scores) == set("abc")
        assert "b is set aside: the score of its weights is 1 nats from that of most" in weights.scores.problem
        (left,) = [one for one in events() if isinstance(one, ReplicaLeft)]
        assert left.replica_id == "b" and "nats" in left.error and not left.took_chunk
        for load in weights.loads(0.0):
            await load
        weights.observe(engines.reports())
        assert not weights.scores.unlike and weights.scores.problem is None
        registry._lost_at.clear()
        assert [one.replica_id for one in events() if isinstance(one, ReplicaJoined)] == ["b"]

    run(scenario, "a", "b", "c")


def test_a_replica_that_stays_unlike_is_asked_with_pauses():
    async def scenario(weights, engines):
        await settle(weights, engines)
        engines.unsound["b"] = 100
        engines.folders[""] = "start"
        start = asyncio.get_running_loop().time()
        for tenth in range(40):
            weights.observe(engines.reports())
            for load in weights.loads(start + tenth / 10):
                await load
        assert engines.loads == 4, "at once, then after 0.5, 1 and 2 s"

    run(scenario, "a", "b", "c")


def test_an_update_that_no_replica_holds_as_the_trainer_does_is_refused():
    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        await settle(weights, engines)
        assert await weights.want(1, "w1", "", tuple(one - 1.0 for one in SOUND)) is None
        for load in weights.loads(0.0):
            await load
        weights.observe(engines.reports())
        refused = await weights.loaded()
        assert isinstance(refused, Rejected) and refused.reason.startswith("weights 1 are loaded, but a is set aside: ")

    run(scenario, "a", "b")


@pytest.mark.parametrize("score", [(1.0,), "high", 3])
def test_a_score_of_another_form_is_refused(score):
    async def scenario(weights, engines):
        refused = await weights.want(1, "w1", "", score)
        assert refused.reason.startswith(f"score is {score}; give 31 logprobs")

    run(scenario)


def test_a_replica_that_is_used_again_is_no_newer_than_serve_knows_it():
    registry, core = ReplicaRegistry(), RolloutCore(Policies())
    both = [replace(report(name), started_at=started_at) for name, started_at in (("old", 1.0), ("new", 2.0))]
    for now, aside in ((1.0, {}), (10.0, {"old": "its score differs"}), (20.0, {})):
        for event in registry.observe([(one, now) for one in both], now, aside):
            core.observe(event)
    assert core.replicas.stop_order() == ["new", "old"]
