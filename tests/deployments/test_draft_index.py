"""Laws of the draft index: what it knows, what it proposes, and that it forgets and invents nothing."""

import numpy as np
import pytest

from tailrace.deployments.draft_index.group_index import GroupIndex, HistoryIndex
from tailrace.deployments.draft_index.scorer import MOST_TOKENS, CandidateScorer
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.messages.context import PastAnswer, Source, bits

PROMPT = np.arange(1000, 1012, dtype=np.int32)
ANSWER = np.random.default_rng(7).permutation(500).astype(np.int32)[:200]
"""No token twice, so that one context says exactly what follows."""


def index_with(*mates, settings=IndexSettings(), prompt=PROMPT) -> GroupIndex:  # noqa: B008 -- frozen
    index = GroupIndex(CandidateScorer(settings), prompt)
    for number, mate in enumerate(mates):
        index.extend(number, 0, mate)
    return index


def first(index, sample=9, most=8, paths=1):
    return index.propose(sample, most, paths)[0]


def history(*answers, epoch=0, reward=None, settings=IndexSettings()):  # noqa: B008 -- frozen
    past = [PastAnswer("p", epoch, 0, reward, answer) for answer in answers]
    return HistoryIndex.build(past, epoch + 1, PROMPT, settings)


def test_an_empty_index_has_nothing_to_say():
    assert GroupIndex(CandidateScorer(), np.empty(0, np.int32)).propose(0, 8) == []
    assert index_with().propose(0, 0) == []
    assert index_with(ANSWER).propose(0, 8, paths=0) == []


def test_an_answer_begins_as_a_mates_did():
    proposal = first(index_with(ANSWER))
    assert proposal.tokens.tolist() == ANSWER[:8].tolist()
    assert proposal.sources.tolist() == [Source.MATE] * 8
    assert proposal.match_tokens == len(PROMPT)


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 100])
def test_a_mates_text_is_followed_to_its_end(cut):
    index = index_with(ANSWER)
    index.extend(9, 0, ANSWER[:cut])
    assert first(index, most=64).tokens.tolist() == ANSWER[cut : cut + 64].tolist()
    index.extend(9, cut, ANSWER[cut:-3])
    assert first(index).tokens.tolist() == ANSWER[-3:].tolist()


def test_a_repetition_of_the_sample_itself_is_its_own_evidence():
    index = index_with()
    index.extend(9, 0, np.concatenate([ANSWER[:40], ANSWER[:10]]))
    proposal = first(index)
    assert proposal.tokens.tolist() == ANSWER[10:18].tolist()
    assert set(proposal.sources.tolist()) == {Source.OWN}


def test_the_prompt_is_evidence():
    index = index_with()
    index.extend(9, 0, PROMPT[2:6])
    assert first(index, most=3).tokens.tolist() == PROMPT[6:9].tolist()


@pytest.mark.parametrize("edit", ["another", "one more", "one less"])
def test_a_sample_is_found_again_behind_a_difference(edit):
    """The token after the difference stands in the mate alone: only the alignment knows the place."""
    other = np.array([777], np.int32)
    index = index_with(ANSWER)
    mine = {"another": [ANSWER[:50], other], "one more": [ANSWER[:50], other], "one less": [ANSWER[:49], ANSWER[50:51]]}
    index.extend(9, 0, ANSWER[:48])
    index.propose(9, 8)
    mine = np.concatenate(mine[edit])
    index.extend(9, 48, mine[48:])
    drafted = [proposal.tokens[0] for proposal in index.propose(9, 4, paths=4)]
    assert (ANSWER[51] if edit != "one more" else ANSWER[50]) in drafted


def test_known_tokens_are_skipped_whatever_the_pieces():
    whole, pieces = index_with(ANSWER), index_with()
    for start in range(0, 200, 7):
        pieces.extend(0, max(0, start - 5), ANSWER[max(0, start - 5) : start + 7])
    pieces.extend(0, 3, ANSWER[3:50])
    assert pieces.known(0) == whole.known(0) == len(ANSWER)
    assert pieces.tokens == whole.tokens
    for index in (whole, pieces):
        index.extend(9, 0, ANSWER[:20])
    assert first(whole).tokens.tolist() == first(pieces).tokens.tolist()


def test_a_gap_starts_a_new_run_and_nothing_is_matched_across_it():
    index = index_with()
    index.extend(0, 0, ANSWER[:20])
    index.extend(0, 60, ANSWER[60:100])
    assert index.known(0) == 100
    index.extend(9, 0, ANSWER[:15])
    assert first(index).tokens.tolist() == ANSWER[15:20].tolist()
    assert index.ahead(0, 90, 4).tolist() == ANSWER[90:94].tolist()
    assert index.ahead(0, 50, 4).tolist() == []


def test_what_is_ahead_of_a_position_is_told():
    index = index_with(ANSWER)
    assert index.ahead(0, 10, 5).tolist() == ANSWER[10:15].tolist()
    assert index.ahead(0, 198, 5).tolist() == ANSWER[198:].tolist()
    assert index.ahead(0, 200, 5).tolist() == index.ahead(5, 0, 5).tolist() == []


def test_history_is_attached_detached_and_told_by_source():
    index = index_with()
    index.attach(history(ANSWER))
    proposal = first(index)
    assert proposal.tokens.tolist() == ANSWER[:8].tolist()
    assert set(proposal.sources.tolist()) == {Source.HISTORY}
    index.attach(None)
    assert not np.isin(first(index).tokens, ANSWER).any() if index.propose(9, 8) else True


def test_reward_and_age_decide_between_answers_that_differ():
    good, bad = (np.concatenate([ANSWER[:20], tail]) for tail in (ANSWER[100:110], ANSWER[120:130]))
    for better in (
        [PastAnswer("p", 5, 0, 1.0, good), PastAnswer("p", 5, 0, 0.0, bad)],
        [PastAnswer("p", 5, 0, None, good), PastAnswer("p", 0, 0, None, bad)],
    ):
        for answers in (better, better[::-1]):
            settings = IndexSettings(reward_weight=1.9, epoch_decay=0.5)
            index = index_with(settings=settings)
            index.attach(HistoryIndex.build(answers, 6, PROMPT, settings))
            index.extend(9, 0, ANSWER[:20])
            assert first(index).tokens.tolist() == ANSWER[100:108].tolist()


def test_each_source_can_be_switched_off():
    alone = index_with(ANSWER, settings=IndexSettings(group_context=False))
    assert all(Source.MATE not in proposal.sources for proposal in alone.propose(9, 8))
    settings = IndexSettings(history=False)
    index = index_with(settings=settings)
    index.attach(history(ANSWER, settings=settings))
    assert all(Source.HISTORY not in proposal.sources for proposal in index.propose(9, 8))


def test_each_sample_of_a_call_is_drafted_from_its_own_sources():
    """As copies that race are: their methods are parts of the evidence."""
    mate, past = ANSWER[100:110], ANSWER[120:130]
    index = index_with(np.concatenate([ANSWER[:20], mate]))
    index.attach(history(np.concatenate([ANSWER[:20], past])))
    for sample in (7, 8, 9):
        index.extend(sample, 0, ANSWER[:20])
    found = index.propose_for(
        [7, 8, 9], 8, sources=[bits(source) for source in (Source.MATE, Source.HISTORY, Source.OWN)]
    )
    for paths, tokens, source in zip(found[:2], (mate, past), (Source.MATE, Source.HISTORY), strict=True):
        assert paths[0].tokens.tolist() == tokens[:8].tolist() and set(paths[0].sources.tolist()) == {source}
    assert found[2] == [], "it has not repeated itself"
    index.extend(9, 20, np.concatenate([mate, ANSWER[5:15]]))
    ((own,),) = index.propose_for([9], 8, sources=[bits(Source.OWN)])
    assert own.tokens[:5].tolist() == ANSWER[15:20].tolist() and set(own.sources.tolist()) == {Source.OWN}
    alone = index_with(ANSWER, settings=IndexSettings(group_context=False))
    assert alone.propose_for([9], 8, sources=[bits(Source.MATE)]) == [[]], "what is switched off stays so"


def test_paths_are_distinct_and_best_first():
    mates = [np.concatenate([ANSWER[:20], ANSWER[k : k + 10]]) for k in (50, 50, 50, 80, 80, 110)]
    index = index_with(*mates)
    index.extend(9, 0, ANSWER[:20])
    paths = index.propose(9, 8, paths=4)
    assert [path.tokens[0] for path in paths[:3]] == [ANSWER[50], ANSWER[80], ANSWER[110]]
    assert len({tuple(path.tokens.tolist()) for path in paths}) == len(paths)
    assert first(index).tokens.tolist() == paths[0].tokens.tolist()


def test_probabilities_are_probabilities_and_lengths_agree():
    rng = np.random.default_rng(3)
    mates = [rng.integers(0, 30, 300).astype(np.int32) for _ in range(6)]
    index = index_with(*mates, prompt=rng.integers(0, 30, 20).astype(np.int32))
    for at in range(0, 200, 5):
        for path in index.propose(9, 12, paths=3):
            assert 0 < len(path.tokens) == len(path.right) == len(path.sources) <= 12
            assert ((path.right >= 0) & (path.right <= 1)).all()
        index.extend(9, at, rng.integers(0, 30, 5).astype(np.int32))


def test_it_grows_without_forgetting_and_stays_small():
    rng = np.random.default_rng(5)
    answers = [rng.integers(0, 40_000, 3000).astype(np.int32) for _ in range(16)]
    index = index_with()
    for start in range(0, 3000, 50):
        for sample, answer in enumerate(answers):
            index.extend(sample, start, answer[start : start + 50])
    assert index.tokens == 16 * 3000 + len(PROMPT)
    assert index.nbytes / index.tokens <= 100
    for sample, answer in enumerate(answers):
        index.extend(100 + sample, 0, answer[:30])
        assert first(index, 100 + sample).tokens.tolist() == answer[30:38].tolist()


def test_drafts_are_a_function_of_what_was_told():
    """No state but the tokens and the lessons: two indexes that are told the same say the same."""
    rng = np.random.default_rng(11)
    mates = [rng.integers(0, 50, 200).astype(np.int32) for _ in range(4)]
    one, two = index_with(*mates), index_with(*mates)
    for at in range(0, 100, 4):
        a, b = one.propose(9, 8, 2), two.propose(9, 8, 2)
        assert [p.tokens.tolist() for p in a] == [p.tokens.tolist() for p in b]
        assert [p.right.tolist() for p in a] == [p.right.tolist() for p in b]
        for index in (one, two):
            index.extend(9, at, mates[0][at : at + 4])


def test_odd_input_is_taken():
    index = index_with(ANSWER)
    index.extend(0, 0, np.empty(0, np.int32))
    index.extend(5, 400, ANSWER[:3])
    frozen = ANSWER.copy()
    frozen.flags.writeable = False
    index.extend(6, 0, frozen[::2])
    assert index.known(6) == 100
    assert len(first(index, most=10_000).tokens) <= MOST_TOKENS


def two_groups(settings=IndexSettings()) -> GroupIndex:  # noqa: B008 -- frozen
    """The second of two groups of an engine, with a sample of nothing but a phrase that the first group has written."""
    evidence = CandidateScorer(settings)
    for sample in range(4):
        GroupIndex(evidence, PROMPT[:3]).extend(sample, 0, ANSWER)
    index = GroupIndex(evidence, PROMPT[6:])
    index.extend(9, 0, ANSWER[50:56])
    return index


def test_answers_to_other_prompts_are_evidence_by_their_phrases():
    proposal = first(two_groups())
    assert proposal.tokens.tolist() == ANSWER[56:64].tolist()
    assert set(proposal.sources.tolist()) == {Source.OTHER} and proposal.match_tokens == 0


@pytest.mark.parametrize("off", ["other_prompts", "group_context"])
def test_answers_to_other_prompts_can_be_switched_off(off):
    assert two_groups(IndexSettings(**{off: False})).propose(9, 8) == []
    index = two_groups()
    assert index.propose_for([9], 8, sources=[bits(Source.OWN, Source.MATE, Source.HISTORY)]) == [[]]


@pytest.mark.parametrize("piece", [3, 60])
def test_a_drafted_samples_new_tokens_become_phrases_too(piece):
    evidence = CandidateScorer()
    index = GroupIndex(evidence, PROMPT)
    for at in range(0, 60, piece):
        index.propose(0, 4)
        index.extend(0, at, ANSWER[at : at + piece])
    index.propose(0, 4)
    other = GroupIndex(evidence, PROMPT[6:])
    other.extend(9, 0, ANSWER[40:46])
    assert first(other).tokens.tolist() == ANSWER[46:54].tolist()


@pytest.mark.parametrize("odd", [False, True])
def test_tokens_of_many_samples_at_once_are_the_same_as_one_after_the_other(odd):
    """`odd`: some steps bring a gap, known tokens or a long text, which are no matter for one call of a kernel."""
    evidence = CandidateScorer(), CandidateScorer()
    alone, together = (GroupIndex(each, PROMPT) for each in evidence)
    samples, at, rng = list(range(5)), [0] * 5, np.random.default_rng(1)
    for step in range(30):
        sizes = rng.integers(1, 5, 5).tolist()
        starts = [place + 2 * (odd and step == 9) for place in at]
        starts[0] -= min(starts[0], 2) if odd and step == 12 else 0
        sizes[1] = 20 if odd and step == 15 else sizes[1]
        begins = [(7 * sample + start) % 150 for sample, start in zip(samples, starts, strict=True)]
        tokens = [ANSWER[begin : begin + size].tolist() for begin, size in zip(begins, sizes, strict=True)]
        for piece in zip(samples, starts, tokens, strict=True):
            alone.extend(*piece)
        together.extend_all(samples, starts, tokens)
        at = [start + len(some) for start, some in zip(starts, tokens, strict=True)]
        assert together.known_all(samples).tolist() == [alone.known(sample) for sample in samples]
        for one, other in zip(*(index.draft_rows(samples, 6, 1, 0.0, 1.0) for index in (alone, together)), strict=True):
            assert (one == other).all()
    assert all((one == other).all() for one, other in zip(evidence[0].net, evidence[1].net, strict=True))
    assert any((one != other).any() for one, other in zip(evidence[0].net, CandidateScorer().net, strict=True))
