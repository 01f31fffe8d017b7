"""The demo's two runs on a real service: journals that its page can be made of, and the same tokens in both."""

import asyncio

from tailrace.app.config import load_config
from tailrace.deployments.messages.rollout import PromptGroup
from tailrace.lab.demo.outcome import read, write
from tailrace.lab.demo.page import page
from tailrace.lab.demo.runs import policies_of, roll_out, same_samples


def test_both_runs_make_the_same_samples_and_a_page(client, tmp_path):
    prompts = [PromptGroup(prompt_id=name, text=f"A story of {name}:", samples=2, max_tokens=48) for name in "abcd"]
    heard = []
    policies = policies_of(load_config())
    runs = asyncio.run(asyncio.wait_for(roll_out(client, policies, prompts, lambda *said: heard.append(said)), 900))
    assert heard == [(2, "static"), (3, "tailrace")]
    assert same_samples(*(one.groups for one in runs.values())) == 8
    write(tmp_path, {name: one.journal for name, one in runs.items()}, {"same_samples": 8})
    outcome = read(tmp_path)
    assert outcome.figures()["runs"]["static"]["moves"] == 0
    assert page(outcome, outcome.figures()).startswith("<!DOCTYPE html>")
