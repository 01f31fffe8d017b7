"""The search for the chunk that makes steps raise, over modelled engines: culprits alone are blamed, all others end."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.deployments.engine.suspects import Suspects

LENGTH = 6
"""Tokens of a modelled chunk."""


class Engine:
    """Chunks of LENGTH tokens. `faults`: sets of chunks; a step raises that computes the last token of each of a set.

    `drafts`: tokens that a step may make of a chunk beyond one, but for its first step after a raising one.
    """

    def __init__(self, faults, drafts=0):
        self.faults, self.drafts, self.suspects = faults, drafts, Suspects()
        self.made: dict[str, int] = {}
        self.restarted: set[str] = set()
        self.ended: list[str] = []
        self.blamed: list[str] = []
        self.steps = self.raises = 0

    def add(self, chunk_id):
        self.made[chunk_id] = 0
        self.suspects.join(chunk_id)

    def abort(self, chunk_id):
        if self.made.pop(chunk_id, None) is not None:
            self.suspects.leave(chunk_id)
            self.ended.append(chunk_id)

    def step(self):
        self.steps += 1
        running = list(self.made) if self.suspects.quiet else self.suspects.running()
        assert running, "some chunk runs while there is one"
        size = {one: 1 if one in self.restarted else 1 + self.drafts for one in running}
        last = {one for one in running if self.made[one] + size[one] >= LENGTH}
        if any(fault <= last for fault in self.faults):
            self.raises += 1
            alone = self.suspects.raised(size)
            assert self.suspects.searching
            self.restarted |= set(running)
            if alone is not None:
                assert running == [alone]
                del self.made[alone]
                self.blamed.append(alone)
                self.suspects.blame(alone)
            return
        for one in running:
            self.restarted.discard(one)
            self.made[one] = min(LENGTH, self.made[one] + size[one])
            if self.made[one] == LENGTH:
                del self.made[one]
                self.ended.append(one)
                self.suspects.leave(one)
            else:
                self.suspects.made(one, size[one])

    def finish(self, most_steps):
        while self.made:
            self.step()
            assert self.steps <= most_steps
        assert self.suspects.quiet


def test_while_nothing_raises_everything_runs_and_nothing_is_known():
    engine = Engine([])
    for name in "abc":
        engine.add(name)
    engine.finish(LENGTH)
    assert sorted(engine.ended) == ["a", "b", "c"] and not engine.raises


def test_one_of_many_is_found_by_halves():
    engine = Engine([{"41"}])
    for number in range(64):
        engine.add(str(number))
    engine.finish(100)
    assert engine.blamed == ["41"] and len(engine.ended) == 63
    assert engine.raises == 7, "64, 32, 16, 8, 4, 2 and 1 chunks"


def test_a_lone_chunk_is_tried_twice():
    engine = Engine([{"a"}])
    engine.add("a")
    engine.finish(100)
    assert engine.blamed == ["a"] and engine.raises == 2


def test_a_fault_that_does_not_come_again_blames_no_chunk():
    engine = Engine([])
    for name in "abcd":
        engine.add(name)
    engine.suspects.raised(dict.fromkeys("abcd", 1))
    engine.add("late")
    assert "late" not in engine.suspects.running()
    engine.finish(100)
    assert not engine.blamed and sorted(engine.ended) == ["a", "b", "c", "d", "late"]


def test_a_fault_of_company_ends_in_fewer_at_a_time_and_later_chunks_run_freely():
    engine = Engine([{"a", "d"}])
    for name in "abcdefgh":
        engine.add(name)
    engine.finish(200)
    assert not engine.blamed and len(engine.ended) == 8
    for name in "ijkl":
        engine.add(name)
    before = engine.steps
    engine.finish(before + LENGTH)


def test_a_chunk_that_is_aborted_on_trial_leaves_the_search():
    engine = Engine([{"a"}])
    for name in "abcd":
        engine.add(name)
    while not engine.suspects.searching:
        engine.step()
    engine.abort("a")
    engine.finish(100)
    assert not engine.blamed and sorted(engine.ended) == ["a", "b", "c", "d"]


def test_a_half_that_was_cleared_is_not_tried_again():
    suspects = Suspects()
    suspects.raised({"a": 1, "b": 3, "c": 1, "d": 1})
    assert suspects.running() == ["a", "b"]
    suspects.made("a", 1)
    suspects.made("b", 2)
    assert suspects.running() == ["a", "b"], "the raising step might have made three of it"
    suspects.made("b", 1)
    assert suspects.running() == ["c", "d"]
    suspects.made("c", 1)
    suspects.made("d", 1)
    assert not suspects.searching


def test_a_trial_that_raises_is_halved_before_the_other_half_has_its_turn():
    suspects = Suspects()
    suspects.raised(dict.fromkeys("abcde", 1))
    assert suspects.running() == ["a", "b", "c"]
    assert suspects.raised(dict.fromkeys("abc", 1)) is None and suspects.running() == ["a", "b"]
    suspects.leave("a")
    assert suspects.running() == ["b"]
    assert suspects.raised({"b": 1}) == "b", "its third raise, and alone"
    suspects.blame("b")
    assert suspects.running() == ["c"]
    for name, following in (("c", "de"), ("d", "de")):
        suspects.made(name, 1)
        assert suspects.running() == list(following)
    suspects.made("e", 1)
    assert suspects.quiet, "the culprit was found: the others need no care"


def test_after_one_fruitless_search_all_run_together_and_after_the_next_half_of_the_smallest_step():
    suspects = Suspects()
    for search in range(2):
        suspects.raised(dict.fromkeys("abcd", 1))
        for name in "abcd":
            suspects.made(name, 1)
        assert not suspects.searching and not suspects.quiet
        suspects.join("new")
        assert suspects.running() == (["a", "b", "c", "d", "new"], ["a", "b"])[search]
    for name in "abcd":
        suspects.leave(name)
        assert not suspects.quiet
    suspects.leave("new")
    assert suspects.quiet, "the later ones run freely"
    suspects.raised(dict.fromkeys("xyzw", 1))
    for name in "xyzw":
        suspects.made(name, 1)
    assert suspects.running() == ["x", "y", "z", "w"], "what was found of others is forgotten"


NAMES = [str(number) for number in range(9)]


@given(
    culprits=st.sets(st.sampled_from(NAMES), max_size=4),
    pairs=st.lists(st.sets(st.sampled_from(NAMES), min_size=2, max_size=3), max_size=3),
    drafts=st.integers(0, 3),
    comes=st.lists(st.integers(0, 30), min_size=len(NAMES), max_size=len(NAMES)),
    leaves=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 60), max_size=3),
)
def test_any_faults_end_with_every_chunk_ended_once_and_none_blamed_that_is_whole(
    culprits, pairs, drafts, comes, leaves
):
    engine = Engine([{one} for one in culprits] + pairs, drafts)
    for turn in range(61):
        for name, when in zip(NAMES, comes, strict=True):
            if when == turn:
                engine.add(name)
        for name in [one for one, when in leaves.items() if when == turn]:
            engine.abort(name)
        if engine.made:
            engine.step()
    engine.finish(engine.steps + 1000)
    assert sorted(engine.ended + engine.blamed) == sorted(NAMES)
    assert set(engine.blamed) <= culprits
    assert culprits <= set(engine.blamed) | set(leaves)
