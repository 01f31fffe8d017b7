"""Fastest-of-N changes when a sample is there, not which one: with shared noise a race leaves every token as it is.

Were the copies drawn apart, the first one to end would be the shorter one, and the data would be biased towards short
answers: of answers that stop at any token alike, two racing copies leave half the length.
"""

import asyncio

import numpy as np
import pytest
from transformers import AutoTokenizer

from tailrace.app.files.prompts import read_prompts
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch
from tailrace.lab.demo import PROMPTS
from tailrace.lab.verification.journaled import Journaled
from tailrace.lab.verification.runs import RACES
from tailrace.lab.verification.tokens import compare
from tailrace.policies.families.registry import Policies

pytestmark = pytest.mark.long
PROMPT_COUNT, SAMPLES, MAX_TOKENS = 13, 16, 24
STOPS = (",", ".", ":", " the", " a", " of", " and", " is", "\n")
"""One token in five of the demo model's, so that answers of all lengths end within few tokens."""

RACING = Policies(racing=RACES["racing"] | {"room": SAMPLES})
SIGMAS = 5.0
"""By chance a difference of two means is as large once in 3 million times."""


async def rolled(client, name: str, prompts, seed: int) -> list[GroupResult]:
    batch = RolloutBatch(batch_id=f"{name}-{seed}", groups=tuple(prompts), seed=seed)
    return [group async for group in client.rollout(batch)]


async def roll_all(client, prompts) -> dict:
    """Alone, under three seeds; then raced, prompt by prompt: 16 samples leave room for as many copies of them."""
    await client.set_policies(Policies())
    alone = [await rolled(client, "alone", prompts, seed) for seed in range(3)]
    await client.journal(True)
    await client.set_policies(RACING)
    raced = [group for prompt in prompts for group in await rolled(client, prompt.prompt_id, [prompt], 0)]
    return {"alone": alone, "raced": raced, "copies": Journaled(await client.journal(False)).races}


@pytest.fixture(scope="module")
def found(client, model_dir):
    encode = AutoTokenizer.from_pretrained(model_dir).encode
    stops = [token for text in STOPS for token in encode(text, add_special_tokens=False)]
    defaults = {"samples": SAMPLES, "max_tokens": MAX_TOKENS, "sampling": {"temperature": 1.0, "stop_token_ids": stops}}
    prompts = read_prompts(PROMPTS, defaults)[:PROMPT_COUNT]
    return asyncio.run(asyncio.wait_for(roll_all(client, prompts), 300))


def lengths(groups: list[GroupResult]) -> np.ndarray:
    """By prompt and sample."""
    found = ((g.prompt_id, s.sample_index, len(s.token_ids)) for g in groups for s in g.samples)
    return np.array([length for *_, length in sorted(found)])


def sigmas(longer: np.ndarray, shorter: np.ndarray) -> float:
    """By how many standard errors the means of two independent sets differ."""
    error = sum(of.var(ddof=1) / len(of) for of in (longer, shorter)) ** 0.5
    return (longer.mean() - shorter.mean()) / error


def test_copies_with_shared_noise_leave_every_token_as_it_is(found):
    assert found["copies"] > len(lengths(found["raced"])) / 5, "a good part of them raced"
    result = compare(found["alone"][0], found["raced"])
    assert result["identical"], result["first_difference"]


def test_copies_with_noise_of_their_own_would_favour_short_answers(found):
    """What a race would do whose copies are drawn under two seeds, beside the lengths under a third: when this was
    written 3.5 tokens on average beside 5.6, and 5.1 where copies raced for real."""
    first, second, unraced = map(lengths, found["alone"])
    assert len(unraced) >= 200 and len(set(unraced)) > MAX_TOKENS / 2, "answers of many lengths"
    assert sigmas(unraced, np.minimum(first, second)) > SIGMAS
    assert abs(sigmas(unraced, lengths(found["raced"]))) < SIGMAS / 2
