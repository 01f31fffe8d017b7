"""Ranks that publish a version through the coordinator's book, in virtual time: real files, a recorded update."""

import asyncio
import os
from types import SimpleNamespace

import numpy as np
import pytest

from tailrace.app.calls import publishing_rank
from tailrace.app.calls.publishing_rank import PublishingRank
from tailrace.app.calls.refused import WeightsRejected, accepted
from tailrace.app.weights import publish as publishing
from tailrace.app.weights.held_pieces import Slice, held_pieces
from tailrace.deployments.coordinator.publications import Publications
from tailrace.deployments.messages.pieces import PieceEnd, PublishPhase, RankPart
from tailrace.deployments.messages.rollout import Rejected, WeightsLoaded
from tailrace.deployments.staging.slots import Slots, memory_source
from tailrace.deployments.staging.stage import Stage, StageRefused
from tailrace.lab.fuzz.virtual_time import VirtualLoop

WHOLE = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.arange(5, dtype=np.int8)}
TIMEOUT_S = 60.0


class Site:
    """The book, one rank's view of the service, and what was loaded."""

    def __init__(self, root):
        self.slots, self.loads, self.served = Slots("app-0", root), [], (4, "d")
        self.tasks: set[asyncio.Task] = set()
        self.answer = lambda version, digest: WeightsLoaded(version=version, digest=digest, replicas=("r",))
        self.pause_s = 1.0
        self.looked = asyncio.Event()
        self.looked.set()
        self.book = Publications(lambda: self.served[0], self.load, self._spawn, self.looked.wait)

    def _spawn(self, coroutine) -> None:
        self.tasks.add(asyncio.ensure_future(coroutine))

    async def load(self, version, source, digest, score):
        self.loads.append((version, source, digest, score))
        await asyncio.sleep(self.pause_s)
        return self.answer(version, digest)

    async def own_slots(self) -> str:
        return self.slots.service

    async def status(self):
        return SimpleNamespace(weights_version=self.served[0], weights_digest=self.served[1])

    @property
    def publishing(self):
        return self

    async def run(self, phase, version, rank, content=None):
        return accepted(await self.book.run(phase, version, rank, content), "publish_weights")

    def rank(self, number, size, tensors, version=5, score=(), node="here") -> asyncio.Task:
        pieces = held_pieces(tensors)
        part = RankPart(size, "", False, TIMEOUT_S, tuple(one.piece for one in pieces), score)
        mine = PublishingRank(self, version, number, node)
        return asyncio.ensure_future(mine.publish(part, pieces, lambda: None))

    async def ends(self, *ranks) -> list:
        found = await asyncio.gather(*ranks, return_exceptions=True)
        return [str(one) if isinstance(one, Exception) else one for one in found]


@pytest.fixture
def play(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing_rank, "Slots", lambda service: Slots(service, tmp_path))
    monkeypatch.setattr(publishing_rank, "_in_ray", bytes)
    monkeypatch.setattr(publishing_rank, "_from_ray", lambda shipped, what: memoryview(shipped))

    def run(story):
        loop = VirtualLoop()
        loop.run_until_complete(story(Site(tmp_path)))
        assert not loop.errors

    return run


def halves() -> list[dict]:
    """Rows of `a` for two ranks, which both have `b`."""
    return [{"a": Slice(WHOLE["a"][:3], (4, 6), (0, 0)), "b": WHOLE["b"]},
            {"a": Slice(WHOLE["a"][3:], (4, 6), (3, 0)), "b": WHOLE["b"]}]  # fmt: skip


def digest_of_one_process(root) -> str:
    stage = Stage(Slots("alone", root), 5, (0, ""))
    for name, array in WHOLE.items():
        stage.add(name, array)
    return stage.seal().digest


def lost(version, reason) -> str:
    return f"weights {version}: {reason}; the service keeps its weights"


def test_ranks_make_the_weights_that_one_process_would_send(play, tmp_path):
    async def story(site):
        first, second = halves()
        loaded = await site.ends(site.rank(0, 2, first, score=(-1.0,)), site.rank(1, 2, second))
        ((version, source, digest, score),) = site.loads
        assert (version, score) == (5, (-1.0,)) and [one.version for one in loaded] == [5, 5]
        assert memory_source(source).digest == digest == digest_of_one_process(tmp_path)
        assert (5, digest) in site.slots.held() and not site.slots.part.exists()

    play(story)


def test_a_version_is_refused_for_all_ranks_alike_and_the_next_one_goes_on(play):
    async def story(site):
        site.answer = lambda version, digest: Rejected(reason="no")
        assert await site.ends(*(site.rank(i, 2, held) for i, held in enumerate(halves()))) == ["no", "no"]
        site.answer = lambda version, digest: WeightsLoaded(version=version, digest=digest, replicas=())
        loaded = await site.ends(*(site.rank(i, 2, held, 6) for i, held in enumerate(halves())))
        assert [one.version for one in loaded] == [6, 6]

    play(story)


def test_a_rank_that_does_not_come_is_named_to_the_others_and_told_when_it_comes(play):
    async def story(site):
        first, second = halves()
        began_s = asyncio.get_running_loop().time()
        expected = lost(5, "rank 1 has not joined within 60 s")
        assert await site.ends(site.rank(0, 2, first)) == [expected]
        assert asyncio.get_running_loop().time() - began_s < TIMEOUT_S + 2
        assert not site.slots.part.exists() and not site.loads
        assert await site.ends(site.rank(1, 2, second)) == [expected]
        assert len(await site.ends(*(site.rank(i, 2, held, 6) for i, held in enumerate(halves())))) == 2
        assert [version for version, *_ in site.loads] == [6]

    play(story)


async def dead_rank(site, number, size, tensors, leads=False) -> None:
    """A rank that joins, and makes no other call."""
    pieces = tuple(one.piece for one in held_pieces(tensors))
    call = site.book.run(PublishPhase.JOIN, 5, number, RankPart(size, "here", leads, TIMEOUT_S, pieces))
    site._spawn(call)
    await asyncio.sleep(0)


@pytest.mark.parametrize("others_join", [True, False])
def test_a_rank_that_dies_after_its_manifest_ends_the_version_before_its_limit(play, others_join):
    async def story(site):
        first, second = halves()
        began_s = asyncio.get_running_loop().time()
        await dead_rank(site, 1, 2 if others_join else 3, second)
        ended = await site.ends(site.rank(0, 2 if others_join else 3, first))
        assert ended == [lost(5, "rank 1 has been silent for 30 s")] and not site.loads
        assert asyncio.get_running_loop().time() - began_s < 32

    play(story)


def test_the_leader_s_death_before_it_has_sealed_ends_the_version(play):
    async def story(site):
        first, second = halves()
        await dead_rank(site, 0, 2, first, leads=True)
        site.slots.part.mkdir()
        other = site.rank(1, 2, second)
        while site.book._latest is None or not site.book._latest.plans.done():
            await asyncio.sleep(0.1)
        site._spawn(
            site.book.run(
                PublishPhase.STAGED, 5, 0, (PieceEnd("0" * 32),) * len(site.book._latest.plans.result()[0].written)
            )
        )
        (reason,) = await site.ends(other)
        assert reason in (lost(5, "rank 0 has been silent for 30 s"), lost(5, "rank 0 has not sealed within 60 s"))
        assert not site.loads

    play(story)


def test_the_version_is_loaded_once_it_is_sealed_whatever_happens_to_ranks(play):
    async def story(site):
        first, second = halves()
        site.pause_s = 100.0
        leader, other = site.rank(0, 2, first), site.rank(1, 2, second)
        while not site.loads:
            await asyncio.sleep(0.1)
        other.cancel()
        (loaded,) = await site.ends(leader)
        assert loaded.version == 5

    play(story)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"a": np.zeros((4, 5), np.float32)}, "rank 1 has a as F32 [4, 5], rank 0 as F32 [4, 6]"),
        ({"a": Slice(WHOLE["a"][2:], (4, 6), (2, 0))}, "rank 0 and rank 1 hold different pieces of a that overlap"),
        ({}, "no rank holds 6 of the 24 values of a"),
    ],
)
def test_parts_that_make_no_whole_end_the_version(play, second, reason):
    async def story(site):
        first, _ = halves()
        assert await site.ends(site.rank(0, 2, first), site.rank(1, 2, second)) == [lost(5, reason)] * 2

    play(story)


def test_a_rank_that_sends_twice_ends_the_version_while_it_is_open_and_changes_nothing_after_it(play):
    async def story(site):
        first, second = halves()
        ranks = site.rank(0, 2, first), site.rank(0, 2, first)
        assert await site.ends(*ranks) == [lost(5, "rank 0 has sent it twice")] * 2
        await site.ends(*(site.rank(i, 2, held, 6) for i, held in enumerate(halves())))
        assert await site.ends(site.rank(1, 2, second, 6)) == ["weights 6: rank 1 has sent it twice; it is loaded once"]
        assert [version for version, *_ in site.loads] == [6]

    play(story)


def test_a_rank_whose_copy_fails_tells_the_others(play):
    async def story(site):
        first, second = halves()
        other = site.rank(1, 2, second)
        real = PublishingRank._write
        PublishingRank._write = lambda self, *rest: 1 / 0 if self.rank == 0 else real(self, *rest)
        try:
            (reason, heard) = await site.ends(site.rank(0, 2, first), other)
        finally:
            PublishingRank._write = real
        assert reason == "division by zero"
        assert heard == lost(5, "rank 0: ZeroDivisionError: division by zero")

    play(story)


@pytest.mark.parametrize("others_first", [True, False])
def test_a_rank_that_is_refused_before_it_joins_ends_the_version_by_name_at_once(play, monkeypatch, others_first):
    monkeypatch.setattr(publishing, "this_node", lambda: "here")
    monkeypatch.setattr(publishing, "_place", lambda group: (1, 2))
    monkeypatch.setattr(publishing, "blocking", lambda call: lambda error: asyncio.ensure_future(call(error)))

    async def story(site):
        first, second = halves()
        began_s, other = asyncio.get_running_loop().time(), [site.rank(0, 2, first)] if others_first else []
        await asyncio.sleep(1.0)
        with pytest.raises(StageRefused, match="tensor c is a SimpleNamespace of no type"):
            publishing.begin(5, {**second, "c": SimpleNamespace(shape=(1,))}, client=site)
        await asyncio.sleep(0.1)
        expected = lost(5, "rank 1: tensor c is a SimpleNamespace of no type")
        assert await site.ends(*(other or [site.rank(0, 2, first)])) == [expected]
        assert asyncio.get_running_loop().time() < began_s + 3 and not site.loads
        loaded = await site.ends(*(site.rank(i, 2, held, 6) for i, held in enumerate(halves())))
        assert [one.version for one in loaded] == [6, 6]

    play(story)


def test_a_rank_whose_node_cannot_stage_ends_the_version_at_once(play, monkeypatch):
    lead = publishing_rank._lead

    def no_room(slots, version, served):
        if version == 5 and slots.part.exists():
            raise StageRefused("no room")
        return lead(slots, version, served)

    async def story(site):
        first, second = halves()
        one = site.rank(0, 2, first)
        await asyncio.sleep(1.0)
        monkeypatch.setattr(publishing_rank, "_lead", no_room)
        reasons = await site.ends(one, site.rank(1, 2, second))
        assert reasons == [lost(5, "rank 1: no room"), "no room"]

    play(story)


def test_odd_calls_are_refused_in_one_line(play):
    async def story(site):
        first, second = halves()
        assert await site.ends(site.rank(0, 2, first, version=4)) == [
            "weights version 4 is not above 4; versions only grow"
        ]
        assert await site.ends(site.rank(2, 2, first)) == [lost(5, "rank 2 is none of 2")]
        ranks = site.rank(0, 2, first, 6), site.rank(1, 3, second, 6)
        reason = "rank 1 is one of 3 ranks, and the first to come one of 2"
        assert await site.ends(*ranks) == [lost(6, reason)] * 2
        ahead = site.rank(0, 2, first, 7), site.rank(1, 2, second, 8)
        await asyncio.sleep(1.0)
        assert await site.ends(ahead[0]) == [lost(7, "rank 1 has gone on to 8")]
        late = await site.ends(site.rank(0, 2, first, 7))
        assert late == ["weights 7: rank 0 is late; others have gone on to 8"]
        with pytest.raises(WeightsRejected, match="weights 3: rank 0 has not joined it here; publish a higher version"):
            await site.run(PublishPhase.STAGED, 3, 0, ())
        assert len(await site.ends(ahead[1])) == 1 and not site.loads
        assert await asyncio.to_thread(publishing.next_version, site) == 9, "8 has ended, the service has 4"

    play(story)


def test_a_new_coordinator_looks_at_its_replicas_before_it_names_or_refuses_a_version(play):
    async def story(site):
        site.looked.clear()
        site.served = 0, ""
        calls = [
            asyncio.ensure_future(site.run(PublishPhase.NEXT, 0, 0)),
            site.rank(0, 1, halves()[0], version=4),
        ]
        await asyncio.sleep(1.0)
        assert not any(call.done() for call in calls)
        site.served = 4, "d"
        site.looked.set()
        assert await site.ends(*calls) == [5, "weights version 4 is not above 4; versions only grow"]

    play(story)


def test_another_trainer_s_stage_is_not_disturbed(play):
    async def story(site):
        mine = Stage(site.slots, 9, (0, ""))
        reason = "other weights of this service are being staged on the ranks' node; commit or drop them"
        assert await site.ends(*(site.rank(i, 2, held) for i, held in enumerate(halves()))) == [lost(5, reason)] * 2
        mine.add("a", WHOLE["a"])
        assert mine.seal().version == 9

    play(story)


def test_ranks_of_other_nodes_ship_their_pieces_to_the_leader_s(play, tmp_path):
    async def story(site):
        first, second = halves()
        loaded = await site.ends(site.rank(0, 2, first), site.rank(1, 2, second, node="there"))
        assert {one.digest for one in loaded} == {digest_of_one_process(tmp_path)}
        assert not site.book._latest._staged and not site.book._latest.pieces.done(), "Ray may drop them"

    play(story)


def test_of_two_nodes_that_may_have_the_stage_one_has_it(play, tmp_path, monkeypatch):
    there = tmp_path / "there"
    there.mkdir()
    roots = {"app-0": tmp_path, "app-there": there}
    monkeypatch.setattr(publishing_rank, "Slots", lambda service: Slots("app-0", roots[service]))

    async def story(site):
        first, second = halves()
        other = Site(tmp_path)
        other.book, other.slots = site.book, Slots("app-there", there)

        def load(version, digest):
            os.close(Slots("app-0", there).lock())  # a replica there pulls the version under this lock
            return WeightsLoaded(version=version, digest=digest, replicas=())

        site.answer = load
        loaded = await site.ends(site.rank(0, 2, first), other.rank(1, 2, second, node="there"))
        assert {one.digest for one in loaded} == {digest_of_one_process(tmp_path)}
        assert not list(there.glob("*-part")) and not Slots("app-0", there).held() and len(site.loads) == 1

    play(story)


def test_a_stall_of_the_coordinator_is_no_rank_s_silence(play):
    async def story(site):
        first, second = halves()
        leader = site.rank(0, 2, first)
        await asyncio.sleep(1.0)
        asyncio.get_running_loop()._now_s += 40.0  # nothing has run meanwhile
        await asyncio.sleep(1.0)
        assert not leader.done()
        loaded = await site.ends(leader, site.rank(1, 2, second))
        assert [one.version for one in loaded] == [5, 5]

    play(story)
