"""Steps that raise: the engine lives, the request to blame ends with the reason, its mates' tokens are as without it.

One engine with drafts of the group, driven turn by turn. Faults are planted where a step
can raise: in vLLM's scheduler and worker, in the sampler, and in our drafts.
"""

import contextlib
import time

import numpy as np
import pytest
from engine_answers import ANSWER_S

from tailrace.deployments.drafting.drafts import EngineDrafts
from tailrace.deployments.engine.engine_loop import EngineLoop
from tailrace.deployments.engine.stepper import Stepper
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.command import LoadWeights, Peek
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.errors import EngineDown, RequestRefused
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.protocol.events import ChunkEnd

TOKENS = 20
PROMPT = np.tile(np.array([504, 2365, 355, 260, 4052, 314, 253, 1568, 282, 260, 1004, 28], np.int32), 3)
WARM = SamplingParams(temperature=0.6, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
MATES = (0, 1, 2, 4, 5)


def chunk(sample: int, sampling=WARM, **changes) -> ChunkRequest:
    """Even samples draft from their group, odd ones have no drafts."""
    plan = DraftPlan(GroupRef("b/g", "g"), sample, 0, TOKENS, (0, 0), FixedBudget(tokens=4))
    values = {
        "chunk_id": f"sample{sample}",
        "sample_key": sample_key(7, 0, "p", sample),
        "token_ids": np.roll(PROMPT, sample % 3),
        "prompt_tokens": len(PROMPT),
        "max_tokens": TOKENS,
        "sampling": sampling,
        "weights_version": 0,
        "draft": None if sample % 2 else plan,
    }
    return ChunkRequest(**(values | changes))


@pytest.fixture(scope="module")
def loop(tiny_model):
    draft = DraftConfig(method="group", draft_tokens=4)
    config = EngineConfig(model=str(tiny_model), max_model_len=256, max_running=8, kv_cache_gib=0.05, draft=draft)
    loop = EngineLoop(Stepper(config, "faults", 0, 0))
    yield loop
    loop.end()


def submit(loop, *chunks) -> dict:
    answers = {}
    for one in chunks:
        loop.submit(one, lambda answer, name=one.chunk_id: answers.setdefault(name, answer))
    return answers


def turn_until(loop, is_over) -> None:
    deadline_s = time.monotonic() + ANSWER_S  # no number of turns: one that waits for the pool takes no time
    while time.monotonic() < deadline_s:
        loop.turn(0.0)
        assert loop.healthy, loop.problem
        if is_over():
            return
    raise AssertionError(f"a hang: {loop.stats().running}")


def run(loop, *chunks) -> list:
    answers = submit(loop, *chunks)
    turn_until(loop, lambda: len(answers) == len(chunks))
    return [answers[one.chunk_id] for one in chunks]


@pytest.fixture(scope="module")
def wanted(loop):
    """The mates' results without a culprit, by sample."""
    return dict(zip(MATES, run(loop, *map(chunk, MATES)), strict=True))


def test_another_context_shows_in_the_logprobs(loop, wanted):
    """Else the tests below would show nothing: one other token at the start of the prompt, the same answer forced."""
    answer = wanted[1].token_ids
    other = chunk(1, forced=answer)
    other.token_ids[0] += 1
    (found,) = run(loop, other)
    moved = np.abs(found.raw_logprobs - wanted[1].raw_logprobs)
    assert moved[: TOKENS // 2].max() > 1e-2 < moved[TOKENS // 2 :].max()


def assert_as_wanted(results: list, wanted: dict, samples=MATES):
    for sample, result in zip(samples, results, strict=True):
        assert not isinstance(result, Exception), result
        np.testing.assert_array_equal(result.token_ids, wanted[sample].token_ids)
        np.testing.assert_allclose(result.logprobs, wanted[sample].logprobs, atol=1e-4)
        np.testing.assert_allclose(result.raw_logprobs, wanted[sample].raw_logprobs, atol=1e-4)
        assert len(result.logprobs) == len(result.token_ids) and result.end is wanted[sample].end


def stepper_of(loop) -> Stepper:
    return loop._stepper


@contextlib.contextmanager
def planted(monkeypatch, owner, name, is_due, after=False):
    """Has a method raise, before or after its work, when `is_due` of its arguments. Yields the number of raises."""
    real, raises = getattr(owner, name), []

    def method(*args, **named):
        due = is_due(*args)
        result = real(*args, **named) if after or not due else None
        if due:
            raises.append(name)
            raise OverflowError("planted\nin two lines")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, method)
        yield raises


def in_sampler(loop, monkeypatch, culprits: dict[int, int], company=False, times=1000):
    """Raises when the rows of a step hold a token of a culprit from an answer position on, or those of all of them."""
    places, seen = {sample_key(7, 0, "p", sample): len(PROMPT) + at for sample, at in culprits.items()}, []

    def is_due(logits, batch, owner, positions):
        keys = batch.columns["key"][owner].tolist()
        found = {key for key, at in zip(keys, positions.tolist(), strict=True) if places.get(key, at + 1) <= at}
        due = len(found) == len(places) if company else bool(found)
        seen.append(due)
        return due and sum(seen) <= times

    sampler = stepper_of(loop)._engine.model_executor.driver_worker.worker.model_runner.sampler
    return planted(monkeypatch, sampler, "draw", is_due)


@pytest.mark.parametrize("at", [0, 1, 7, TOKENS - 1], ids=lambda at: f"at {at}")
@pytest.mark.parametrize("culprit", [3, 6], ids=["plain", "drafting"])
def test_a_request_that_raises_in_the_sampler_ends_alone(loop, wanted, monkeypatch, at, culprit):
    with in_sampler(loop, monkeypatch, {culprit: at}) as raises:
        *results, refused = run(loop, *map(chunk, (*MATES, culprit)))
    assert_as_wanted(results, wanted)
    assert isinstance(refused, RequestRefused) and "OverflowError" in str(refused) and "\n" not in str(refused)
    assert len(raises) >= 2, "a chunk is tried again before it is blamed"
    assert not loop.stats().running


def test_two_culprits_end_and_a_culprit_without_mates(loop, wanted, monkeypatch):
    with in_sampler(loop, monkeypatch, {3: 2, 6: 9}):
        *results, one, other = run(loop, *map(chunk, (*MATES, 3, 6)))
        alone = run(loop, chunk(3))
    assert_as_wanted(results, wanted)
    assert [type(each) for each in (one, other, *alone)] == [RequestRefused] * 3


def test_a_fault_of_two_in_company_is_the_fault_of_neither(loop, wanted, monkeypatch):
    with in_sampler(loop, monkeypatch, {1: 4, 4: 4}, company=True) as raises:
        results = run(loop, *map(chunk, MATES))
    assert raises
    assert_as_wanted(results, wanted)


def test_a_fault_that_does_not_come_again_ends_no_chunk(loop, wanted, monkeypatch):
    with in_sampler(loop, monkeypatch, {1: 4}, times=1) as raises:
        results = run(loop, *map(chunk, MATES))
    assert len(raises) == 1
    assert_as_wanted(results, wanted)


def names_culprit(scheduler_output) -> bool:
    return any(name.startswith("sample3-") for name in scheduler_output.num_scheduled_tokens)


PLACES = {
    "before the model": ("worker", "execute_model", names_culprit, False),
    "after the model": ("worker", "execute_model", names_culprit, True),
    "outputs": ("scheduler", "update_from_output", lambda scheduled, made: names_culprit(scheduled), True),
    "drafts": ("drafts", "made_by", lambda made: any(name == "sample3" for name, _ in made), True),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_request_that_raises_anywhere_ends_alone(loop, wanted, monkeypatch, place):
    owner, name, is_due, after = PLACES[place]
    stepper = stepper_of(loop)
    owners = {
        "worker": stepper._engine.model_executor.driver_worker.worker,
        "scheduler": stepper._engine.engine_core.engine_core.scheduler,
        "drafts": stepper._drafts,
    }
    assert isinstance(owners["drafts"], EngineDrafts)
    with planted(monkeypatch, owners[owner], name, is_due, after):
        *results, refused = run(loop, *map(chunk, (*MATES, 3)))
    assert isinstance(refused, RequestRefused)
    assert_as_wanted(results, wanted)
    assert_as_wanted(run(loop, *map(chunk, MATES)), wanted)


def test_calls_during_a_search_are_answered(loop, wanted, monkeypatch):
    with in_sampler(loop, monkeypatch, {3: 6}):
        answers = submit(loop, *map(chunk, (3, *MATES)))
        suspects = stepper_of(loop)._suspects
        turn_until(loop, lambda: suspects.searching)
        held = [one for one in MATES if f"sample{one}" not in answers]
        waiting = next(one for one in held if f"sample{one}" not in suspects.running())
        late, peeked = submit(loop, chunk(8)), loop.ask(Peek(f"sample{waiting}"))
        loaded = loop.ask(LoadWeights(0, "", "another"))
        loop.turn(0.0)
        assert stepper_of(loop).busy and set(loop.stats().running) >= {f"sample{waiting}", "sample8"}
        so_far = peeked.result(0)
        np.testing.assert_array_equal(so_far, wanted[waiting].token_ids[: len(so_far)])
        loop.abort(f"sample{waiting}")

        def all_have_ended():
            assert len(answers) == len(MATES) + 1 or not loaded.done(), "weights wait for all chunks that came before"
            return len(answers) == len(MATES) + 1 and late

        turn_until(loop, all_have_ended)
    ended = answers[f"sample{waiting}"]
    assert ended.end is ChunkEnd.ABORTED
    np.testing.assert_array_equal(ended.token_ids, wanted[waiting].token_ids[: len(ended.token_ids)])
    others = [one for one in MATES if one != waiting]
    assert_as_wanted([answers[f"sample{one}"] for one in others], wanted, others)
    assert isinstance(answers["sample3"], RequestRefused) and len(late["sample8"].token_ids) == TOKENS
    loop.turn(0.0)
    assert isinstance(loaded.exception(0), ValueError)


# ---- requests that leave no token, or that nothing can hold ----------------------------------------


def word(loop) -> tuple[int, str]:
    """A token, and the text that bans it."""
    tokenizer = stepper_of(loop)._requests.tokenizer
    return 504, tokenizer.decode([504])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rules_that_leave_no_token_end_the_request_with_the_position(loop, wanted, temperature):
    token, text = word(loop)
    digits = {"regex": "[0-9]{3}"}
    at_once = SamplingParams(temperature=temperature, allowed_token_ids=(token,), structured_outputs=digits)
    later = SamplingParams(
        temperature=temperature, allowed_token_ids=(token,), bad_words=(text + text,), ignore_eos=True
    )
    *results, one, other = run(loop, *map(chunk, MATES), chunk(3, at_once), chunk(6, later))
    assert_as_wanted(results, wanted)
    assert isinstance(one, RequestRefused) and "no token is left" in str(one) and "position 0" in str(one)
    assert isinstance(other, RequestRefused) and "no token is left" in str(other) and "position 1" in str(other)


REFUSED = {
    "context": {"token_ids": np.append(PROMPT, np.int32(10**6))},
    "negative": {"token_ids": np.append(PROMPT, np.int32(-1))},
    "long": {"token_ids": np.tile(PROMPT, 9)},
    "forced": {"forced": np.array([10**6], np.int32)},
    "temperature": {"sampling": SamplingParams().model_copy(update={"temperature": float("inf")})},
    "nan": {"sampling": SamplingParams().model_copy(update={"temperature": float("nan")})},
    "float32": {"sampling": SamplingParams().model_copy(update={"temperature": 1e300})},
    "stop": {"sampling": SamplingParams(stop_token_ids=(10**6,), min_tokens=1)},
    "negative stop": {"sampling": SamplingParams().model_copy(update={"stop_token_ids": (-3,)})},
    "allowed": {"sampling": SamplingParams(allowed_token_ids=(10**6,))},
    "bias": {"sampling": SamplingParams(logit_bias=((10**6, 1.0),))},
    "surrogate": {"sampling": SamplingParams().model_copy(update={"bad_words": ("\ud800",)})},
    "key": {"sample_key": -1},
    "type": {"max_tokens": "many"},
    "no sampling": {"sampling": None},
}


def test_what_no_engine_can_hold_is_refused_in_one_line_and_harms_nobody(loop, wanted):
    bad = [chunk(3, **{"chunk_id": name} | changes) for name, changes in REFUSED.items()]
    answers = run(loop, *bad[:8], *map(chunk, MATES), *bad[8:])
    results = answers[8 : 8 + len(MATES)]
    refused = dict(zip(REFUSED, answers[:8] + answers[8 + len(MATES) :], strict=True))
    assert {name: type(one) for name, one in refused.items()} == dict.fromkeys(REFUSED, RequestRefused)
    assert not [one for one in refused.values() if "\n" in str(one)]
    assert_as_wanted(results, wanted)
    assert not loop.stats().running


def test_a_top_k_beyond_int32_is_no_filter(loop, wanted):
    (result,) = run(loop, chunk(1, WARM.model_copy(update={"top_k": 2**31})))
    np.testing.assert_array_equal(result.token_ids, wanted[1].token_ids)


def test_states_of_a_replica_are_not_the_requests_fault(loop):
    (other,) = run(loop, chunk(1, weights_version=5))
    assert isinstance(other, ValueError) and not isinstance(other, RequestRefused)


def test_vllm_has_nothing_of_a_request_that_it_refuses_by_half(loop, wanted, monkeypatch):
    stepper = stepper_of(loop)
    scheduler = stepper._engine.engine_core.engine_core.scheduler
    with planted(
        monkeypatch, scheduler, "add_request", lambda request: request.request_id.startswith("sample3-"), True
    ):
        *results, refused = run(loop, *map(chunk, MATES), chunk(3))
    assert isinstance(refused, RequestRefused)
    assert_as_wanted(results, wanted)
    assert not stepper._engine.output_processor.request_states and not scheduler.requests


def test_an_engine_whose_healthy_request_fails_is_down(loop, monkeypatch):
    """The last test: it ends the engine."""
    sampler = stepper_of(loop)._engine.model_executor.driver_worker.worker.model_runner.sampler
    with planted(monkeypatch, sampler, "draw", lambda *_: True):
        answers = submit(loop, *map(chunk, MATES))
        while loop.turn(0.0):
            pass
        loop.end()
    assert [type(answer) for answer in answers.values()] == [EngineDown] * len(MATES)
