"""The modelled replica makes every token, repeats to the digit, and finds drafts worth their time where they are."""

import json

import numpy as np
import pytest

from tailrace.app.errors import BadInput
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.messages.context import PastAnswer
from tailrace.lab.benchmarks.drafting.budgets import CPU, EarlierDrafts, Replica, cost_of, measure, workload
from tailrace.lab.benchmarks.drafting.drafts import RecordedRollouts
from tailrace.policies.families.registry import load_policy


def rollouts(alike: float) -> list[RecordedRollouts]:
    """Two prompts of four samples that share `alike` of a common text."""
    rng = np.random.default_rng(3)
    made = []
    for _ in range(2):
        text = rng.integers(0, 5000, 90).astype(np.int32)
        samples = [np.where(rng.random(90) < alike, text, rng.integers(0, 5000, 90)).astype(np.int32) for _ in range(5)]
        history = [PastAnswer("", 0, 0, None, samples.pop())]
        made.append(RecordedRollouts(rng.integers(0, 5000, 20).astype(np.int32), samples[:1], samples, history))
    return made


def outcome(policy: str, alike: float, running: int = 4):
    chunks, history = workload(rollouts(alike), load_policy("drafting", policy))
    return Replica(IndexSettings(), chunks[0].draft.policy, CPU, running, EarlierDrafts(history)).run(chunks)


@pytest.mark.parametrize("policy", ["off", "fixed", "aimd", "goodput"])
def test_every_token_is_made_once(policy):
    found = outcome(policy, alike=0.9)
    steps = 2 * 4 * 90 / found.acceptance_length
    assert steps + found.accepted == pytest.approx(2 * 4 * 90, rel=2e-3)
    assert (found.drafted == 0) == (policy == "off")


def test_it_repeats_to_the_digit():
    assert outcome("fixed", 0.8)._replace(draft_us=0) == outcome("fixed", 0.8)._replace(draft_us=0)


def test_drafts_that_come_true_save_time_and_others_are_left_out():
    assert outcome("goodput", 0.98, running=2).makespan_s < 0.7 * outcome("off", 0.98, running=2).makespan_s
    assert outcome("goodput", 0.0).makespan_s < 1.02 * outcome("off", 0.0).makespan_s


def test_the_result_has_every_budget_and_its_ratio():
    result = measure(rollouts(0.95), CPU, 2, lambda _: None)
    assert set(result["ratio"]) == set(result["runs"]) >= {"off", "goodput", "unlimited", "goodput_without_group"}
    assert result["ratio"]["off"] == 1.0 < result["ratio"]["goodput"]
    assert result["tail_speedup"] > 1.0 and result["samples"] == 8
    json.dumps(result)


def test_a_profile_that_is_none_is_refused_by_name(tmp_path):
    step = {"chunks": 2, "draft_tokens": 1, "context_tokens": 32, "step_ms": 40.0}
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"steps": [step, step | {"draft_tokens": 7, "step_ms": 60.0}]}))
    assert cost_of(good).at([4, 16]).tolist() == pytest.approx([0.04, 0.06])
    for text in ("{}", "no", '{"steps": [1]}', '{"steps": []}'):
        bad.write_text(text)
        with pytest.raises(BadInput, match=r"bad\.json"):
            cost_of(bad)
