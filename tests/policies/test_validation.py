"""Each check against impossible events, from both sides of its bound."""

from dataclasses import replace
from math import inf, nan
from types import SimpleNamespace

import pytest
from performances import performance

from tailrace.policies.core import validation
from tailrace.policies.core.fit_queue import MAX_NEED_TOKENS
from tailrace.policies.core.sample_states import HELD, State
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.performance import MethodAcceptance

SPEC = ev.GroupSpec("g", 10, 4, 20)
FINISH = ev.ChunkFinished(1.0, "c", 5, ev.ChunkEnd.LENGTH, 3)
RETURN = ev.SampleReturned(1.0, "s", 4, 20, 2.0)
JOIN = ev.ReplicaJoined(0.0, "r", 16, 100, 8, 0, 0)


def submitted(*specs, share=1.0):
    return ev.SamplesSubmitted(0.0, "b", specs, share=share)


def raises(check, said, *given):
    with pytest.raises(ev.IllegalEvent, match=said):
        check(*given)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt_tokens": 1, "max_tokens": 1, "samples": 0},
        {"chunk_tokens": 1},
        {"past_lengths": ((0, 3),)},
        {"begun": (ev.Begun(0, 1, False), ev.Begun(3, 20, True))},
        {"hold_s": 0.0},
        {"hold_s": 5.5},
        {"hold_s": inf},
        {"prompt_tokens": MAX_NEED_TOKENS - 20},
    ],
)
def test_a_possible_group_passes(changes):
    validation.check_groups(submitted(replace(SPEC, **changes)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_tokens": 0}, "must be at least 1"),
        ({"max_tokens": 0}, "must be at least 1"),
        ({"samples": -1}, "samples at least 0"),
        ({"chunk_tokens": 0}, "chunks of 0 tokens"),
        ({"past_lengths": ((3,), (4, -1))}, "negative length"),
        ({"begun": (ev.Begun(4, 1, False),)}, r"begun samples \[4\] of 4"),
        ({"begun": (ev.Begun(1, 1, False), ev.Begun(1, 2, False))}, r"begun samples \[1, 1\] of 4"),
        ({"begun": (ev.Begun(1, 0, False),)}, r"begun with \[0\] tokens of 20"),
        ({"begun": (ev.Begun(1, 21, False),)}, r"begun with \[21\] tokens of 20"),
        ({"hold_s": -0.5}, "hold_s is -0.5"),
        ({"hold_s": nan}, "hold_s is nan"),
        ({"prompt_tokens": MAX_NEED_TOKENS - 19}, "together exceed"),
    ],
)
def test_an_impossible_group_is_refused(changes, said):
    raises(validation.check_groups, said, submitted(SPEC, replace(SPEC, group_id="h", **changes)))


def test_a_batch_names_a_group_once_and_has_a_share_above_zero():
    raises(validation.check_groups, "repeats a group id", submitted(SPEC, SPEC))
    for share in (0.0, -1.0, inf, nan):
        raises(validation.check_groups, "give a number above 0", submitted(SPEC, share=share))
    validation.check_groups(submitted(SPEC, share=1e-9))


@pytest.mark.parametrize(
    "changes", [{"block_tokens": 0}, {"kv_capacity_blocks": -1}, {"max_running": -1}, {"draft_tokens": -1}]
)
def test_a_replica_has_sizes(changes):
    raises(validation.check_join, "no replica has such sizes", replace(JOIN, **changes))
    validation.check_join(replace(JOIN, **{name: value + 1 for name, value in changes.items()}))


def chunk(beaten=False):
    """A chunk of 6 tokens at most, under weights 3; its sample has 30 tokens of context."""
    return SimpleNamespace(max_tokens=6, weights_version=3, beaten=beaten, sample=SimpleNamespace(context_tokens=30))


@pytest.mark.parametrize(
    "changes",
    [
        {"new_tokens": 0},
        {"new_tokens": 6},
        {"drafted_tokens": 4, "accepted_tokens": 4, "tested_tokens": 4},
        {"model_tested": 2, "model_accepted": 2},
        {"stored_tokens": 35},
    ],
)
def test_a_possible_end_of_a_chunk_passes(changes):
    validation.check_finish(replace(FINISH, **changes), chunk())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"new_tokens": -1}, "-1 tokens, asked for at most 6"),
        ({"new_tokens": 7}, "7 tokens, asked for at most 6"),
        ({"weights_version": 2}, "made by weights 2, started under 3"),
        ({"accepted_tokens": -1}, "-1 of 0 draft tokens accepted"),
        ({"drafted_tokens": 4, "accepted_tokens": 5}, "5 of 4 draft tokens accepted"),
        ({"tested_tokens": -1}, "-1 of 0 draft tokens tested"),
        ({"drafted_tokens": 4, "tested_tokens": 5}, "5 of 4 draft tokens tested"),
        ({"model_accepted": -1}, "-1 of 0 drafts of a model right"),
        ({"model_tested": 2, "model_accepted": 3}, "3 of 2 drafts of a model right"),
        ({"stored_tokens": -1}, "-1 tokens stored, of a context of 35"),
        ({"stored_tokens": 36}, "36 tokens stored, of a context of 35"),
    ],
)
def test_an_impossible_end_of_a_chunk_is_refused(changes, said):
    raises(validation.check_finish, said, replace(FINISH, **changes), chunk())


def test_a_beaten_chunk_may_have_stored_more_than_its_sample_has():
    validation.check_finish(replace(FINISH, stored_tokens=99), chunk(beaten=True))
    raises(validation.check_finish, "asked for at most 6", replace(FINISH, new_tokens=7), chunk(beaten=True))


def sample(state=HELD, context_tokens=30):
    return SimpleNamespace(state=state, context_tokens=context_tokens)


def test_a_held_sample_alone_returns_with_tokens_to_make():
    validation.check_return(RETURN, sample())
    validation.check_return(replace(RETURN, outside_tokens=0, max_tokens=1, hold_s=0.0), sample())
    for state in set(State) - {HELD}:
        raises(validation.check_return, f"s is {state.value}, not between two turns", RETURN, sample(state))
    for changes in ({"outside_tokens": -1}, {"max_tokens": 0}, {"hold_s": -0.1}, {"hold_s": nan}):
        raises(validation.check_return, "no turn is like that", replace(RETURN, **changes), sample())


def test_a_returning_sample_fits_into_the_largest_need():
    validation.check_return(RETURN, sample(context_tokens=MAX_NEED_TOKENS - 24))
    raises(validation.check_return, "together exceed", RETURN, sample(context_tokens=MAX_NEED_TOKENS - 23))


def measured(**changes):
    return ev.ReplicaMeasured(1.0, "r", replace(performance(), **changes))


def test_measured_steps_are_points_of_a_line_and_figures_are_finite():
    validation.check_measured(measured())
    for changes in (
        {"step_tokens": (1.0,), "step_seconds": (0.1,)},
        {"step_tokens": (1.0, 2.0, 3.0), "step_seconds": (0.1, 0.2)},
        {"step_tokens": (2.0, 2.0), "step_seconds": (0.1, 0.2)},
        {"drafter_samples": (1.0,), "drafter_seconds": ()},
        {"drafter_samples": (2.0, 1.0), "drafter_seconds": (0.1, 0.1)},
        {"made": 0.5},
        {"made": inf},
        {"acceptance": (MethodAcceptance("m", -1.0, 1.0),)},
        {"acceptance": (MethodAcceptance("m", 2.0, 1.0),)},
        {"acceptance": (MethodAcceptance("m", 1.0, inf),)},
    ):
        raises(validation.check_measured, "no replica performs like that", measured(**changes))
    for name in ("chunk_s", "drafts", "fetch_base_s", "fetch_token_s", "prefill_token_s", "start_s"):
        validation.check_measured(measured(**{name: 0.0}))
        for figure in (-1e-9, inf, nan):
            raises(validation.check_measured, "no replica is as fast as that", measured(**{name: figure}))
    raises(validation.check_measured, "as fast as that", measured(step_tokens=(1.0, 2.0), step_seconds=(0.1, -0.1)))
    validation.check_measured(measured(made=1.0, acceptance=(MethodAcceptance("m", 0.0, 0.0),)))


def test_a_pool_has_no_negative_size():
    validation.check_pool(ev.PoolReported(0.0, 0, 0, 0.0))
    for capacity, used in ((-1, 0), (0, -1)):
        raises(validation.check_pool, "no pool is like that", ev.PoolReported(0.0, capacity, used, 0.0))


@pytest.mark.parametrize("answer", [1, 5, 9])
def test_a_policy_s_count_between_its_bounds_is_taken(answer):
    assert validation.checked_count(object(), "m", answer, 1, 9) == answer


@pytest.mark.parametrize("answer", [0, 10, 5.0, True, "5", None])
def test_another_answer_of_a_policy_is_named(answer):
    with pytest.raises(validation.WrongAnswer, match=r"m answered .*; an integer from 1 to 9 is wanted"):
        validation.checked_count(object(), "m", answer, 1, 9)


def test_a_long_answer_of_a_policy_is_cut():
    with pytest.raises(validation.WrongAnswer) as error:
        validation.checked_count(object(), "m", "x" * 500, 1, 9)
    assert "xxx...; an integer" in str(error.value) and len(str(error.value)) < 200


def test_a_home_is_a_ready_replica_or_none():
    assert validation.checked_home(object(), None, {"a"}) is None
    assert validation.checked_home(object(), "a", {"a"}) == "a"
    with pytest.raises(validation.WrongAnswer, match="bind answered 'b'; None or the id of a ready replica"):
        validation.checked_home(object(), "b", {"a"})
