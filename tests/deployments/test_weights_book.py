"""Weights are a version and a content: two contents never pass for one version, and an update may be repeated."""

import asyncio
from types import SimpleNamespace

import pytest

from tailrace.deployments.coordinator.weights import MAX_VERSION, OTHER_WEIGHTS, Weights, unlike_score
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.errors import ChunkError
from tailrace.deployments.messages.rollout import Rejected, RejectedBy, RolloutBatch, WeightsLoaded


def report(name: str, version: int = 0, digest: str = "start") -> EngineStats:
    return EngineStats(
        replica_id=name,
        weights_version=version,
        block_tokens=16,
        kv_capacity_blocks=8,
        max_running=2,
        max_model_len=64,
        draft_tokens=0,
        observed_at=0.0,
        weights_digest=digest,
        weights_source=f"w{version}" if version else "",
    )


class Engines:
    """`folders`: content by folder. Replicas that load take over what the folder holds then."""

    def __init__(self, *replicas: str):
        self.folders: dict[str, str] = {}
        self.held = {name: (0, "start") for name in replicas}
        self.refuses: set[str] = set()
        self.loads = 0

    async def digests(self, command):
        source = command.source
        await asyncio.sleep(0)
        if self.held and source not in self.folders:
            raise ChunkError(f"weights folder {source}: no such folder on this machine")
        return {self.folders[source]} if self.held else set()

    async def ask(self, name, command):
        version, source, digest = command.version, command.source, command.digest
        self.loads += 1
        if name in self.refuses or source not in self.folders or digest not in ("", self.folders[source]):
            raise ChunkError("other weights")
        self.held[name] = version, self.folders[source]

    def reports(self):
        return [report(name, *held) for name, held in self.held.items()]


async def settle(weights: Weights, engines: Engines, now: float = 0.0) -> None:
    for _ in range(3):
        weights.observe(engines.reports())
        for load in weights.loads(now):
            await load
    weights.observe(engines.reports())


async def at_once() -> None:
    """Nothing has to be written before weights change."""


def run(scenario, *replicas: str) -> None:
    engines = Engines(*replicas)
    asyncio.run(asyncio.wait_for(scenario(Weights(engines, before=at_once), engines), 60.0))


def test_an_update_reaches_every_replica_and_may_be_repeated():
    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        await settle(weights, engines)
        for _ in range(2):
            assert await weights.want(1, "w1") is None
            await settle(weights, engines)
            assert await weights.loaded() == WeightsLoaded(
                version=1, digest="one", replicas=("a", "b"), paused_s={"a": 0.0, "b": 0.0}
            )
        assert engines.loads == 2, "the second time there is nothing to load"

    run(scenario, "a", "b")


def test_of_two_contents_for_one_version_one_wins():
    async def scenario(weights, engines):
        engines.folders |= {"w1": "one", "other": "two", "copy": "one"}
        await settle(weights, engines)
        answers = await asyncio.gather(weights.want(1, "w1"), weights.want(1, "other"))
        assert sorted(isinstance(answer, Rejected) for answer in answers) == [False, True]
        refused = next(answer for answer in answers if answer is not None)
        assert refused.reason == "weights version 1 is taken by other weights (one); versions only grow"
        assert await weights.want(1, "copy") is None, "the same content in another folder"

    run(scenario, "a")


def test_a_folder_written_over_is_refused_under_the_version_that_it_had():
    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        await settle(weights, engines)
        assert await weights.want(1, "w1") is None
        await settle(weights, engines)
        engines.folders["w1"] = "two"
        refused = await weights.want(1, "w1")
        assert refused.reason == "weights version 1 is taken by other weights (one); versions only grow"
        assert (weights.digest, engines.held) == ("one", {"a": (1, "one")})
        engines.held.clear()
        assert await weights.want(1, "w1") is None, "no replica can look"
        assert weights.digest == "one"

    run(scenario, "a")


def test_a_late_replica_never_serves_what_was_written_over_the_folder():
    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        await settle(weights, engines)
        assert await weights.want(1, "w1") is None
        await settle(weights, engines)
        engines.folders["w1"] = "two"
        engines.held["late"] = 0, "start"
        await settle(weights, engines)
        assert engines.held["late"] == (0, "start") and weights.problem == "late: other weights"
        engines.held["late"] = 1, "two"  # whatever brought it there
        (known,) = [weights.known(one) for one in engines.reports() if one.replica_id == "late"]
        assert known.weights_version == OTHER_WEIGHTS

    run(scenario, "a")


def test_a_failing_load_is_asked_for_with_growing_pauses():
    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        engines.refuses.add("a")
        await settle(weights, engines)
        assert await weights.want(1, "w1") is None
        start, counts = asyncio.get_running_loop().time(), []
        for tenth in range(140):  # a pause counts from the moment of the failure, which is `start` in this test
            weights.observe(engines.reports())
            for load in weights.loads(start + tenth / 10):
                await load
            counts.append(engines.loads)
        assert counts[4] == 1 and counts[6] == 2 and counts[9] == 2 and counts[11] == 3, "after 0.5 s, then after 1"
        assert counts[-1] == 6, "then after 2, 4 and 8"

    run(scenario, "a")


def test_without_replicas_an_update_is_accepted_and_the_first_one_names_the_content():
    async def scenario(weights, engines):
        engines.folders |= {"w1": "one", "other": "two"}
        assert await weights.want(1, "w1") is None
        assert await weights.loaded() == WeightsLoaded(version=1, replicas=())
        assert isinstance(await weights.want(1, "other"), Rejected)
        engines.held["a"] = 0, "start"
        await settle(weights, engines)
        assert weights.digest == "one" and engines.held["a"] == (1, "one")

    run(scenario)


def test_an_unread_update_that_turns_out_bad_is_withdrawn():
    """Without replicas it is accepted; the first one to start finds that it cannot load it."""

    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        engines.held["a"] = 0, "start"
        await settle(weights, engines)
        engines.held.clear()
        weights.observe([])
        assert await weights.want(1, "nowhere") is None and not weights.is_confirmed
        engines.held["b"] = 0, "start"
        weights.observe(engines.reports())
        (known,) = map(weights.known, engines.reports())
        assert known.weights_version == OTHER_WEIGHTS, "nothing starts under the version before"
        await settle(weights, engines)
        assert (weights.version, weights.digest) == (0, "start")
        assert weights.problem.startswith("weights 1 are withdrawn: b: ")
        assert [weights.known(one).weights_version for one in engines.reports()] == [0]
        assert await weights.want(1, "w1") is None
        await settle(weights, engines)
        assert engines.held["b"] == (1, "one")

    run(scenario)


def test_a_bad_unread_update_gives_way_to_the_unread_one_before_it():
    """A batch that was taken under that one must not run under older weights."""

    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        weights.observe([])
        assert await weights.want(1, "w1") is None and await weights.want(2, "nowhere") is None
        engines.held["b"] = 0, "start"
        await settle(weights, engines)
        await settle(weights, engines, now=1e9)
        assert (weights.version, weights.digest, engines.held["b"]) == (1, "one", (1, "one"))

    run(scenario)


def test_a_new_coordinator_adopts_the_weights_that_it_finds():
    async def scenario(weights, engines):
        engines.folders["w7"] = "seven"
        engines.held = {"a": (7, "seven"), "b": (0, "start")}
        await settle(weights, engines)
        assert (weights.version, weights.digest, weights.source) == (7, "seven", "w7")
        assert engines.held["b"] == (7, "seven")

    run(scenario)


@pytest.mark.parametrize("replicas", [("a",), ()])
def test_an_update_repeated_at_a_new_coordinator_must_be_of_the_same_content(replicas):
    async def scenario(weights, engines):
        engines.folders["w7"] = "written over"
        refused = await weights.want(7, "w7", "seven")
        if replicas:
            assert refused == Rejected(reason="weights w7: it is not one content of version 7 (seven, written over)")
            assert weights.version == 0
            engines.folders["w7"] = "seven"
            assert await weights.want(7, "w7", "seven") is None
        else:
            assert refused is None, "no replica can look"
            engines.held["late"] = (0, "start")
            await settle(weights, engines)
            assert engines.held["late"] == (0, "start") and "other weights" in weights.problem
            engines.folders["w7"] = "seven"
        await settle(weights, engines, now=1e12)
        assert (weights.version, weights.digest) == (7, "seven")
        assert set(engines.held.values()) == {(7, "seven")}

    run(scenario, *replicas)


def test_an_overtaken_update_says_so():
    async def scenario(weights, engines):
        engines.folders |= {"w1": "one", "w2": "two"}
        await settle(weights, engines)
        assert await weights.want(1, "w1") is None
        waiting = asyncio.ensure_future(weights.loaded())
        await asyncio.sleep(0)
        assert await weights.want(2, "w2") is None
        await settle(weights, engines)
        assert (await waiting).reason == "weights 1 were overtaken by 2"
        assert (await weights.want(1, "w1")).reason == "weights version 1 is below 2; versions only grow"

    run(scenario, "a")


def test_an_update_of_a_service_that_then_falls_asleep_is_refused_at_once_and_may_be_repeated():
    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        await settle(weights, engines)
        assert await weights.want(1, "w1") is None
        waiting = asyncio.ensure_future(weights.loaded())
        await asyncio.sleep(0)
        weights.asleep = True
        await settle(weights, engines)
        reason = (await asyncio.wait_for(waiting, 10.0)).reason
        assert reason == "weights 1 are accepted, but the service sleeps; call again to load them"
        assert await weights.want(1, "w1") is None
        weights.asleep = False
        await settle(weights, engines)
        assert (await weights.loaded()).replicas == ("a",)

    run(scenario, "a")


def test_a_caller_that_has_waited_for_long_is_refused_with_the_replicas_that_lack_the_weights(monkeypatch):
    monkeypatch.setattr("tailrace.deployments.coordinator.weights.LOAD_S", 0.02)

    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        engines.refuses.add("b")
        await settle(weights, engines)
        assert await weights.want(1, "w1") is None
        await settle(weights, engines)
        reason = (await weights.loaded()).reason
        assert reason.startswith("weights 1 are accepted, but after 0 s ['b'] do not hold them; b: ")
        assert reason.endswith("; call again to wait on")

    run(scenario, "a", "b")


@pytest.mark.parametrize("version", [0, -1, True, None, "1", 1.0, MAX_VERSION + 1])
@pytest.mark.parametrize("source", ["w1"])
def test_a_bad_version_is_refused_by_name(version, source):
    refused = asyncio.run(Weights(SimpleNamespace(), before=at_once).want(version, source))
    assert refused.reason == f"weights version is {version!r}; give an integer from 1 to {MAX_VERSION}"


@pytest.mark.parametrize("source", [None, "", {"a": 5}])
def test_a_bad_folder_is_refused_by_name(source):
    refused = asyncio.run(Weights(SimpleNamespace(), before=at_once).want(1, source))
    assert refused.reason == f"weights folder is {source!r}; give a path"


@pytest.mark.parametrize(("wants", "refused"), [
    ({}, False), ({"weights_version": 0}, False), ({"weights_version": 7}, True), ({"min_weights_version": 7}, True),
])  # fmt: skip
def test_a_batch_under_other_weights_is_refused(wants, refused):
    group = {"prompt_id": "p", "text": "x"}
    answer = Weights(SimpleNamespace(), before=at_once).refusal(RolloutBatch(batch_id="b", groups=(group,), **wants))
    assert (answer is not None) == refused
    if refused:
        assert answer.by is RejectedBy.WEIGHTS and "holds weights version 0, the batch wants 7" in answer.reason


@pytest.mark.parametrize("odd", [float("nan"), float("-inf"), None, "-1.0", pytest.param(10**400, id="huge")])
def test_a_trainers_score_is_of_finite_numbers_else_every_replica_would_pass(odd):
    async def scenario(weights, engines):
        engines.folders["w1"] = "one"
        score = [-1.0] * 31
        assert unlike_score(score) is None
        refused = await weights.want(1, "w1", "", [*score[1:], odd])
        assert "give 31 logprobs, finite numbers" in refused.reason and weights.version == 0

    run(scenario, "a")
