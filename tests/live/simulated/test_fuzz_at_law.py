"""The simulation at exactness `law`: attempts to make a sample part, and tokens that were handed out never change."""

from types import SimpleNamespace

import pytest

from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.rollout import SampleResult, SamplingParams, Segment
from tailrace.lab.fuzz.campaign import outcome_of
from tailrace.lab.fuzz.checks import Ledger, ResultChecks, Wrong
from tailrace.lab.fuzz.chunks import RunningChunk, logprob_of
from tailrace.lab.fuzz.faults import KINDS
from tailrace.lab.fuzz.odd.plan import ODDITIES
from tailrace.lab.fuzz.run import NOISES, plan_of
from tailrace.lab.fuzz.token_law import TokenLaw, token_at
from tailrace.lab.fuzz.worlds.plan import WORLDS
from tailrace.policies.protocol.actions import SampleEnd

EVERY = (*KINDS, *ODDITIES, *WORLDS)
SEEDS, MORE_SEEDS = range(8), range(8, 60)
PROMPT = (5, 6, 7)
KEY = sample_key(1, 0, "g", 0)
NOISY = TokenLaw(10_000, 0.5)


def made_by(attempt: str, context: tuple[int, ...], count: int, law: TokenLaw = NOISY) -> tuple[int, ...]:
    """The tokens that a chunk makes after a context."""
    chunk = ChunkRequest(
        chunk_id="c",
        sample_key=KEY,
        token_ids=list(context),
        prompt_tokens=len(PROMPT),
        max_tokens=count,
        sampling=SamplingParams(),
        weights_version=0,
    )
    ahead = RunningChunk(chunk, "start", law, attempt).ahead()
    return tuple(next(ahead) for _ in range(count))


def checked(tokens: tuple[int, ...], law: TokenLaw = NOISY) -> None:
    cluster = SimpleNamespace(size=SimpleNamespace(law=law), forgetful=False)
    logprobs = tuple(map(logprob_of, tokens))
    sample = SampleResult(
        sample_index=0, token_ids=tokens, text="", logprobs=logprobs, raw_logprobs=logprobs,
        finish_reason=SampleEnd.LENGTH,
        segments=(Segment(weights_version=0, replica_id="r", start=0, end=len(tokens)),),
    )  # fmt: skip
    ResultChecks(cluster, Ledger()).check_turn(KEY, PROMPT, len(tokens), sample, "g#0")


def test_without_noise_tokens_depend_on_key_weights_and_position_alone():
    found = made_by("r1/c", PROMPT, 40, TokenLaw(10_000))
    assert found == made_by("r2/c", (9, 9, 9), 40, TokenLaw(10_000))
    assert found == tuple(token_at(KEY, "start", 3 + place, 10_000) for place in range(40))


def test_attempts_part_and_a_chunk_that_continues_handed_out_tokens_is_right():
    one, other = made_by("r1/c", PROMPT, 40), made_by("r2/c", PROMPT, 40)
    assert one != other and one == made_by("r1/c", PROMPT, 40)
    checked(one)
    checked(one[:20] + made_by("r2/d", PROMPT + one[:20], 20))


def test_tokens_of_two_attempts_side_by_side_are_found():
    """What a service would give that draws a sample again, and keeps a part of what it had handed out."""
    one, other = made_by("r1/c", PROMPT, 40), made_by("r2/c", PROMPT, 40)
    with pytest.raises(Wrong, match="are not those of weights 0"):
        checked(one[:20] + other[20:])
    with pytest.raises(Wrong, match="are not those of weights 0"):
        checked((*one[:20], one[20] ^ 1, *one[21:]))


def test_a_seed_is_the_same_history_with_noise():
    for seed in range(20):
        bits, law = plan_of(seed, EVERY), plan_of(seed, EVERY, exactness="law")
        assert not bits.size.noise and law.size.noise in NOISES
        assert (law.drivers, law.faults, law.odd, law.worlds) == (bits.drivers, bits.faults, bits.odd, bits.worlds)


def test_no_seed_fails_at_law():
    outcomes = [outcome_of(seed, EVERY, exactness="law") for seed in SEEDS]
    assert {one.seed: one.problem for one in outcomes if one.problem} == {}
    assert sum(one.samples for one in outcomes) > 300


@pytest.mark.long
def test_no_seed_fails_at_law_at_length():
    outcomes = [outcome_of(seed, EVERY, exactness="law") for seed in MORE_SEEDS]
    assert {one.seed: one.problem for one in outcomes if one.problem} == {}
