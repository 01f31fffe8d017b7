"""Requests of trainers that cannot be installed here, as their own client code sends them: tests/data/transcripts.

An answer fits if it has the transcript's values; `$number`, `$text`, `$prompt_logprobs` and `$token_id` are kinds, a
list of one item is that of each, and `$logprob` is SGLang's triple. Transcripts were written from the sources that
they name.
"""

import asyncio
import json
from pathlib import Path

import pytest
from virtual_cluster import play_gateway

TRANSCRIPTS = Path(__file__).parents[2] / "data" / "transcripts"
KINDS = {
    "$number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "$text": lambda value: isinstance(value, str) and value != "",
    "$prompt_logprobs": lambda value: (
        value[0] is None and all("logprob" in next(iter(one.values())) for one in value[1:])
    ),
    "$logprob": lambda value: len(value) == 3 and value[0] <= 0.0 and isinstance(value[1], int) and value[2] is None,
    "$token_id": lambda value: isinstance(value, str) and value.removeprefix("token_id:").isdigit(),
}


def misfit(wanted, found, place: str = "answer") -> str | None:
    """The first place where an answer does not fit, or None."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or wanted.keys() - found.keys():
            return f"{place} has no {sorted(wanted.keys() - dict(found or {}).keys())}"
        parts = [(wanted[name], found[name], f"{place}.{name}") for name in wanted]
    elif isinstance(wanted, list):
        if not isinstance(found, list) or not found:
            return f"{place} is {found!r}"
        parts = [(wanted[0], item, f"{place}[{index}]") for index, item in enumerate(found)]
    else:
        fits = KINDS[wanted](found) if isinstance(wanted, str) and wanted in KINDS else found == wanted
        return None if fits else f"{place} is {found!r}, not {wanted!r}"
    return next((fault for part in parts if (fault := misfit(*part)) is not None), None)


@pytest.mark.parametrize(
    ("wanted", "found", "fault"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, None),
        ({"a": 1}, {"b": 2}, "answer has no ['a']"),
        ({"a": ["$number"]}, {"a": [1, 2.5]}, None),
        ({"a": ["$number"]}, {"a": []}, "answer.a is []"),
        ({"a": [{"b": "$text"}]}, {"a": [{"b": "x"}, {"b": ""}]}, "answer.a[1].b is '', not '$text'"),
        ("$token_id", "token_id:17", None),
        ("$token_id", "17th", "answer is '17th', not '$token_id'"),
        ("$number", True, "answer is True, not '$number'"),
    ],
)
def test_a_misfit_is_found(wanted, found, fault):
    assert misfit(wanted, found) == fault


@pytest.mark.parametrize("name", ["prime_rl", "skyrl", "slime", "miles", "areal"])
def test_the_calls_of_a_trainers_client_are_answered(name, tmp_path):
    calls = json.loads((TRANSCRIPTS / f"{name}.json").read_text())["calls"]

    async def story(cluster, http):
        cluster.disk.folders["w1"] = "content-1"
        http = http()
        for call in calls:
            sent = {key: call[key] for key in ("json", "headers") if key in call}
            answer = await asyncio.wait_for(http.request(*call["send"], params=call.get("query"), **sent), 60)
            where = f"{' '.join(call['send'])}: {answer.text}"
            assert answer.status_code == call["status"], where
            if "text" in call:
                assert call["text"] in answer.text, where
            else:
                assert misfit(call.get("answer", {}), answer.json()) is None, where
        status = cluster.coordinator.rollouts.status()
        assert status.weights_version == 1 and not status.paused

    play_gateway(story, tmp_path)
