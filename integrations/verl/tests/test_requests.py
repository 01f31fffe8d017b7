"""verl's requests as groups: names, sampling parameters, limits; each refusal is one line."""

import pytest
from tailrace_verl.global_steps import GlobalSteps
from tailrace_verl.requests import Lengths, asked
from tailrace_verl.settings import settings

LENGTHS = Lengths(prompt=16, response=32)
VERL = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def test_verls_parameters_become_tailraces():
    one = asked([1, 2], VERL, "id", LENGTHS, group="u", index=2, of=4, step=7)
    sampling = one.group.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 0)
    assert (one.group.prompt_id, one.group.samples, one.index, one.step, one.keyed_by) == ("u", 4, 2, 7, "group")


@pytest.mark.parametrize(
    ("extra", "prompt", "limit"),
    [({}, 2, 32), ({"max_tokens": 5}, 2, 5), ({"max_new_tokens": 6}, 2, 6), ({}, 40, 8), ({"max_tokens": 0}, 2, 1)],
)
def test_limits_are_those_of_verls_servers(extra, prompt, limit):
    assert asked(range(prompt), VERL | extra, "id", LENGTHS).group.max_tokens == limit


def test_without_a_size_a_sample_is_a_group_of_its_own():
    one = asked([1], VERL, "id", LENGTHS, group="u", index=3)
    assert (one.group.prompt_id, one.group.samples, one.index) == ("u.3", 1, 0)
    assert asked([1], VERL, "id", LENGTHS, group="u", index=4, of=4).group.prompt_id == "u.4"


def test_without_a_name_the_request_id_and_the_prompt_are_the_key():
    first, again = (asked([1], VERL, "det-0", LENGTHS) for _ in range(2))
    assert first == again and first.keyed_by == "request_id"
    assert first.group.prompt_id != asked([2], VERL, "det-0", LENGTHS).group.prompt_id
    assert first.group.prompt_id != asked([1], VERL, "det-1", LENGTHS).group.prompt_id


@pytest.mark.parametrize(
    "extra", [{"repetition_penalty": 0.0}, {"prompt_logprobs": 1}, {"seed": 3}, {"stop": [""]}, {"top_p": 1.5}]
)
def test_what_is_not_honoured_is_refused_in_one_line(extra):
    with pytest.raises(ValueError, match=next(iter(extra))) as error:
        asked([1], VERL | extra, "id", LENGTHS)
    assert len(str(error.value).splitlines()) == 1


def test_global_steps_follow_the_versions():
    steps = GlobalSteps()
    assert steps.of(5) == 0
    for version, step in ((6, 0), (7, 3), (9, None)):
        steps.record(version, step)
    assert [steps.of(version) for version in (5, 6, 7, 8, 9, 10)] == [0, 0, 3, 3, 3, 3]


def test_settings_name_the_key_at_fault():
    assert settings({}).weights_dir is None
    with pytest.raises(ValueError, match=r"engine_kwargs\.tailrace\.adress"):
        settings({"tailrace": {"adress": "auto"}})
