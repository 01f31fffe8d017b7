"""A sample's line to its draft model outlives chunks; a late drafter catches up, one that never joins is given back.

Engine and model are the stand-ins of `drafter_pair`; they are real in `tests/live/drafter/test_drafter_live.py`.
"""

import pytest
from drafter_pair import PROMPT_TOKENS, Pair

from tailrace.deployments.drafter.lines import KEPT_S, MAX_ALONE, MAX_KEPT, MAX_LATE
from tailrace.policies.protocol.actions import DraftMode

LONG = 2_000
SLOW, FAST = 6, 40
"""Tokens that a drafter computes in one of its steps: in a chunk of 64 that is 1,536 of a long context; or enough."""


# ---- a late drafter -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True])
def test_a_drafter_that_needs_longer_than_a_chunk_for_a_context_drafts_in_a_later_chunk(coupled):
    pair = Pair(SLOW, coupled=coupled)
    accepted = [pair.run(LONG + 64 * number, 64) for number in range(6)]
    assert accepted[0] == 0 and sum(accepted[3:]) > 0
    counts = pair.drafters.counts()
    assert (counts["model_opened"], counts["model_resumed"], counts["model_joined"]) == (1, 5, 1)
    assert counts.get("model_given_back", 0) == counts["model_unjoined"] == 0


def test_a_context_that_is_being_computed_is_computed_to_its_end():
    """Less than a block between two confirmations, so that beginning anew from whole blocks would come to nothing."""
    pair = Pair(SLOW)
    pair.run(LONG, 300)
    assert pair.drafters.counts()["model_joined"] == 1
    assert pair.sessions.counts()["behind"] > 0


def test_a_drafter_no_faster_than_its_target_joins_where_samples_take_turns():
    """It has a token for each that the engine makes, and would never have a whole window while the engine goes on."""
    pair = Pair(LONG, steps=1, coupled=True)
    pair.clock.now_s = 0.0
    chunk_id = pair.start(LONG, 400)
    pair.clock.now_s += 60.0  # the drafter has been busy with others
    pair.step()
    assert pair.drafters.counts()["model_late"] == 1
    while chunk_id in pair.chunks:
        pair.step()
    assert pair.accepted[chunk_id] > 200, "of each window all but one"


# ---- over chunks ----------------------------------------------------------------------------------------


def test_drafts_go_on_where_the_last_chunk_ended():
    pair = Pair(FAST, steps=12)
    pair.run(100, 64)
    before = pair.model.added
    assert pair.run(164, 64) > 30
    assert pair.model.added == before, "no context was computed anew"


def test_another_way_costs_nothing_that_was_computed():
    """As with `draft_models: planned`."""
    pair = Pair(FAST, steps=12)
    pair.run(100, 64, mode=DraftMode(4, False))
    before = pair.model.added
    assert pair.run(164, 64, mode=DraftMode(2, False)) > 20
    assert pair.model.added == before and pair.drafters.counts()["model_opened"] == 1
    assert pair.run(228, 64, mode=DraftMode(0, True)) == 0, "nobody drafts"
    assert pair.drafters.counts()["model_lines"] == 0 == pair.hear_all()["open"]
    assert pair.run(292, 64) > 0
    assert pair.drafters.counts()["model_opened"] == 2


def test_what_was_made_elsewhere_meanwhile_is_confirmed():
    pair = Pair(FAST)
    pair.run(100, 64)
    assert pair.run(200, 64) > 30
    assert pair.drafters.counts()["model_opened"] == 1


def test_a_sample_that_begins_again_has_a_line_of_its_own():
    pair = Pair(FAST)
    pair.run(100, 64)
    assert pair.run(100, 64) > 30, "it was rolled out again, from an earlier token"
    assert pair.drafters.counts()["model_opened"] == 2 and pair.hear_all()["open"] == 1


def test_two_chunks_of_a_sample_have_two_lines_and_one_is_kept():
    pair = Pair(FAST)
    one, two = pair.start(100, 64), pair.start(110, 54)
    while {one, two} & set(pair.chunks):
        pair.step()
    counts = pair.drafters.counts()
    assert (counts["model_opened"], counts["model_lines"]) == (2, 1) and pair.hear_all()["open"] == 1


# ---- given back -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_line_that_never_joins_is_counted_and_given_back_and_its_sample_asks_no_more():
    pair = Pair(pace=0)
    for number in range(MAX_ALONE // 64):
        pair.run(LONG + 64 * number, 64)
    counts = pair.drafters.counts()
    assert (counts["model_unjoined"], counts.get("model_given_back", 0)) == (1, 0)
    for number in range(MAX_ALONE // 64, MAX_ALONE // 64 + 3):
        pair.run(LONG + 64 * number, 64)
    counts, heard = pair.drafters.counts(), pair.hear_all()
    assert (counts["model_given_back"], counts["model_opened"]) == (1, 1)
    assert counts["model_lines"] == counts["model_unjoined"] == 0
    assert (heard["open"], heard["stopped_before_a_guess"]) == (0, 1)


@pytest.mark.slow
def test_others_have_what_was_given_back():
    """Room for one of two: the first gets nowhere, and the second has none until the first is given back."""
    pair = Pair(pace=0, kv_blocks=LONG // 32 + 60)
    pair.start(LONG, 3_000)
    for _ in range(MAX_ALONE // 2):
        pair.step()
    other = pair.start(LONG, 3_000, index=1)
    pair.step()
    assert pair.sessions.counts()["without_kv"] == 1
    while not pair.drafters.counts().get("model_given_back"):
        pair.step()
    pair.model.pace = FAST
    while not pair.accepted[other]:
        pair.step()
    assert pair.sessions.counts()["without_kv"] == 0 and pair.drafters.counts()["model_given_back"] == 1


def test_a_drafter_that_speaks_but_is_late_each_time_is_waited_for_longer_and_then_given_back():
    """Each wait is twice as long; all of them together are bounded."""
    pair = Pair(pace=0, coupled=True)
    chunk_id = pair.start(100, 400)
    (line,) = pair.drafters._named.values()
    waited_s = []
    while line.address:
        waited_s.append(line.patience_s)
        pair.clock.now_s += line.patience_s + 0.01
        assert not pair.drafters.waits(chunk_id)
        line.silent = False  # it has said that it is near
        line.since_s = pair.clock()
    assert waited_s == [0.5 * 2**turn for turn in range(MAX_LATE)]
    assert pair.drafters.counts()["model_given_back"] == 1


def test_new_drafters_are_a_new_chance():
    pair = Pair(pace=0)
    chunk_id = pair.start(100, 2 * MAX_ALONE)
    while not pair.drafters.counts().get("model_given_back"):
        pair.step()
    pair.drafters.meet([])
    pair.drafters.exchange()
    pair.drafters.meet([pair.address])
    pair.model.pace = FAST
    while not pair.accepted[chunk_id]:
        pair.step()
    assert pair.drafters.counts()["model_opened"] == 2


# ---- nothing is left ------------------------------------------------------------------------------------


def nothing_left(pair: Pair) -> bool:
    counts, heard = pair.drafters.counts(), pair.hear_all()
    return counts["model_lines"] == counts["model_kept"] == heard["open"] == len(pair.model.running) == 0


def test_a_sample_that_has_all_its_tokens_leaves_nothing():
    pair = Pair(FAST)
    pair.run(100, 64, most=192 - PROMPT_TOKENS)
    assert not nothing_left(pair)
    pair.run(164, 28, most=192 - PROMPT_TOKENS)
    assert nothing_left(pair)


def test_a_sample_that_stops_leaves_nothing():
    pair = Pair(FAST)
    chunk_id = pair.start(100, 64)
    for _ in range(5):
        pair.step()
    pair.end(chunk_id, goes_on=False)
    assert nothing_left(pair)


def test_a_sample_that_goes_on_elsewhere_leaves_nothing_for_long():
    pair = Pair(FAST)
    pair.run(100, 64)
    pair.drafters.tidy()
    assert not nothing_left(pair)
    pair.clock.now_s += KEPT_S + 1
    pair.drafters.tidy()
    assert nothing_left(pair)


def test_so_many_lines_are_kept_and_no_more():
    pair = Pair(0, kv_blocks=0)
    for index in range(MAX_KEPT + 3):
        pair.end(pair.start(10, 64, index=index), goes_on=True)
    counts = pair.drafters.counts()
    assert counts["model_lines"] == counts["model_kept"] == MAX_KEPT == pair.hear_all()["open"]


def test_kept_lines_go_with_their_drafter():
    pair = Pair(FAST)
    pair.run(100, 64)
    pair.drafters.meet([])
    pair.drafters.exchange()
    counts = pair.drafters.counts()
    assert counts["model_lines"] == counts["model_kept"] == 0
    assert pair.run(164, 64) == 0


# ---- room -----------------------------------------------------------------------------------------------


def test_requests_of_all_samples_together_fit_into_the_kv_cache():
    """Those opened first have theirs; who waits has it once they have ended."""
    blocks = 12
    pair = Pair(FAST, kv_blocks=blocks)
    ids = [pair.start(100, 64, index=index) for index in range(4)]
    while set(ids) & set(pair.chunks):
        pair.step()
        assert sum(-(-len(request.tokens) // 32) for request in pair.model.running.values()) <= blocks
    assert pair.accepted[ids[0]] > 0 == pair.accepted[ids[3]]
