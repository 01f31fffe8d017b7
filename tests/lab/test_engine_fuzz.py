"""The grammar of odd requests, and the parts of the engine's fuzz that need no engine."""

import json
from dataclasses import fields
from random import Random

import fuzzed_hosts
import numpy as np
import pytest
from click.testing import CliRunner

from tailrace.app.errors import Failed
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult
from tailrace.deployments.messages.rollout import BatchSettings, PromptGroup
from tailrace.deployments.messages.sampling import SamplingParams, StructuredOutputs
from tailrace.deployments.messages.session import SampleRequest
from tailrace.lab.commands.fuzz import command
from tailrace.lab.fuzz.engine import fields as fields_of
from tailrace.lab.fuzz.engine import grammar, refused_text
from tailrace.lab.fuzz.engine.contradictions import CONTRADICTIONS
from tailrace.lab.fuzz.engine.engine_campaign import engine_campaign, requests_of, signature
from tailrace.lab.fuzz.engine.entry import OddSample, by_hand
from tailrace.lab.fuzz.engine.hosted import HostedEngine
from tailrace.lab.fuzz.engine.problems import LATE, LOST, TRACE
from tailrace.lab.fuzz.engine.rules import broken
from tailrace.lab.fuzz.engine.shorten import shortened
from tailrace.lab.fuzz.engine.values import CONTEXT_TOKENS, EOS, VOCABULARY, expanded
from tailrace.policies.protocol.events import ChunkEnd

DRAWN = [grammar.drawn(Random(seed)) for seed in range(2_000)]
NOT_DRAWN = {"kv"}
"""Fields of a chunk for which this engine has no use: it has no pool."""


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (fields_of.SAMPLING, set(SamplingParams.model_fields)),
        (fields_of.GROUP, set(PromptGroup.model_fields)),
        (fields_of.SESSION_FIELDS, set(SampleRequest.model_fields) - {"group"}),
        (fields_of.BATCH_FIELDS, set(BatchSettings.model_fields)),
        (fields_of.CHUNK, {field.name for field in fields(ChunkRequest)} - NOT_DRAWN),
    ],
)
def test_every_field_of_a_request_is_drawn(names, known):
    assert set(names) == known


def test_every_form_of_an_answer_is_drawn():
    forms = {name for values in fields_of.SAMPLING["structured_outputs"].values() for form in values for name in form}
    assert forms >= {field.alias or name for name, field in StructuredOutputs.model_fields.items()}


def test_a_request_can_be_printed_and_given_again():
    for request in DRAWN:
        again = json.loads(json.dumps(request))
        assert json.dumps(again) == json.dumps(request) and len(json.dumps(request)) < 8_000


def test_a_seed_names_its_requests():
    assert json.dumps(requests_of(7, 3)) == json.dumps(requests_of(7, 3)) != json.dumps(requests_of(7, 4))


def test_all_ways_and_all_fields_come():
    assert {request["way"] for request in DRAWN} == set(grammar.WAYS)
    text = json.dumps(DRAWN)
    tables = fields_of.SAMPLING, fields_of.GROUP, fields_of.SESSION_FIELDS, fields_of.BATCH_FIELDS, fields_of.CHUNK
    assert [name for table in tables for name in table if f'"{name}"' not in text] == []


def test_a_chunk_is_made_by_hand_of_whatever_was_drawn():
    for request in DRAWN:
        if request["way"] == grammar.HAND:
            assert isinstance(by_hand(expanded(request["message"]), "odd-0", "group"), ChunkRequest)
    for sampling in CONTRADICTIONS:
        SamplingParams.model_construct(**expanded(sampling))


def test_short_forms_are_made_long():
    given = {"a": {"$repeat": ["ab", 3]}, "b": [{"$repeat": [[1, 2], 2]}], "c": {"$nest": ["(", "x", ")", 2]}}
    assert expanded(given) == {"a": "ababab", "b": [[1, 2, 1, 2]], "c": "((x))"}
    assert expanded({"$ref": "#"}) == {"$ref": "#"}


@pytest.mark.parametrize("culprits", [{5}, {0}, {2, 9}])
def test_a_problem_is_made_small(culprits):
    """The culprits alone remain, each with the field that shows the problem."""
    requests = [
        {
            "way": "session",
            "late": True,
            "message": {"group": {"prompt_id": str(i), "sampling": {"top_k": i, "min_p": 1}}},
        }
        for i in range(12)
    ]

    def shows(some: list[dict]) -> bool:
        found = {one["message"]["group"].get("sampling", {}).get("top_k") for one in some}
        return culprits <= found

    small = shortened(requests, shows, 200)
    assert [one["message"]["group"]["sampling"] for one in small] == [{"top_k": i} for i in sorted(culprits)]
    assert all("late" in one for one in small) and len(requests) == 12


def test_problems_of_other_numbers_are_the_same():
    assert signature("a", "after 10.5 s: 'x' [1, 2]") == signature("a", "after 7 s: 'yy' [3]")
    assert signature("a", "after 1 s") != signature("b", "after 1 s") != signature("b", "before 1 s")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt 'odd': top_k: 2147483648 is above 49152", None),
        ("", "0 lines"),
        ("top_k is wrong\nTraceback", "2 lines"),
        ("it is wrong", "names no field"),
        ("a profile often returns with contexts, steps and textures", "names no field"),
        ("stop: \ud800", "no Unicode"),
        ("stop: " + "a" * 2_000, "characters"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_field(text, words):
    found = refused_text.fault(text)
    assert found is None if words is None else words in found


def answered(tokens: list[int], end: ChunkEnd = ChunkEnd.LENGTH, logprob: float = -1.0, **sampling) -> OddSample:
    chunk = ChunkRequest("odd", 0, np.ones(4, np.int32), 4, len(tokens), SamplingParams(**sampling), 0)
    values = np.full(len(tokens), logprob, np.float32)
    result = ChunkResult("odd", np.array(tokens, np.int32), values, values, end, 0, 0.0, 0.0, 0.0, 0, 4)
    return OddSample(chunk, len(tokens), list(tokens), [result])


def text_of(tokens) -> str:
    """A token is a letter: 97 is a."""
    return "".join(chr(token) for token in tokens if token != EOS)


RULES = {
    "sound": (answered([97, 98]), None),
    "at its stop": (answered([97, EOS], ChunkEnd.STOP), None),
    "not allowed": (answered([97, 98], allowed_token_ids=(97,)), "allowed_token_ids"),
    "bad word": (answered([97, 98, 99], bad_words=("bc",)), "bad_words"),
    "beyond a stop token": (answered([97, 98], stop_token_ids=(97,)), "stop_token_ids"),
    "beyond the end of sequence": (answered([EOS, 98]), "stop_token_ids"),
    "beyond a stop": (answered([97, 98, 99], stop=("ab",)), "stop:"),
    "ended by nothing": (answered([97, 98], ChunkEnd.STOP), "no rule"),
    "ended early": (answered([97, EOS], ChunkEnd.STOP, min_tokens=1), None),
    "ended too early": (answered([97, EOS], ChunkEnd.STOP, min_tokens=3), "min_tokens"),
    "no number": (answered([97], logprob=float("nan")), "logprobs"),
    "a probability above 1": (answered([97], logprob=0.5), "logprobs"),
    "no such token": (answered([VOCABULARY]), "not in the vocabulary"),
    "another choice": (answered([97], structured_outputs={"choice": ("b",)}), "choice"),
    "no JSON": (answered([97, EOS], ChunkEnd.STOP, structured_outputs={"json_object": True}), "json"),
    "no top": (answered([97], top_logprobs=2), "top_logprobs"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_named(name):
    sample, words = RULES[name]
    found = broken(sample, text_of, lambda text: [ord(letter) for letter in text], CONTEXT_TOKENS)
    assert found is None if words is None else found is not None and words in found


def test_an_answer_of_another_length_than_asked_for_is_found():
    sample = answered([97, 98])
    sample.results[0] = answered([97, 98, 99]).results[0]
    sample.tokens = [97, 98, 99]
    assert "max_tokens" in broken(sample, text_of, lambda text: [], CONTEXT_TOKENS)


@pytest.fixture
def hosted():
    """Makes hosts by their function; ends them."""
    made = []

    def make(serve, **settings) -> HostedEngine:
        made.append(HostedEngine(serve=serve, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def numbered(count: int = 12) -> list[dict]:
    return [{"way": "session", "message": {"number": i}} for i in range(count)]


def test_a_dead_engine_is_found_with_the_place_and_started_again(hosted):
    engine = hosted(fuzzed_hosts.dies_of_seven)
    ((kind, text, _),) = engine.run(numbered())["problems"]
    assert kind == LOST and "ended with 9 at entry 0" in text
    assert engine.run(numbered(3))["problems"] == [] and engine.starts == 2


def test_an_engine_that_dies_between_two_rounds_is_lost_and_started_again(hosted):
    engine = hosted(fuzzed_hosts.dies_after_its_answer)
    assert engine.run(numbered(1))["problems"] == []
    engine._process.join()
    ((kind, text, _),) = engine.run(numbered(1))["problems"]
    assert kind == LOST and "ended with 5 at the begin" in text
    assert engine.run(numbered(1))["problems"] == [] and engine.starts == 2


def test_a_dead_engine_is_traced_to_its_request(hosted):
    engine = hosted(fuzzed_hosts.dies_of_seven)
    small = shortened(numbered(), lambda some: engine.run(some)["problems"] != [], 40)
    assert small == [{"way": "session", "message": {"number": 7}}]


@pytest.mark.slow
def test_a_hang_is_found_with_its_stack(hosted):
    engine = hosted(fuzzed_hosts.hangs, silent_s=1.0)
    ((kind, text, _),) = engine.run(numbered(1))["problems"]
    assert kind == LATE and "no word at entry 0" in text and "fuzzed_hosts.py" in text and "hangs" in text


def test_a_traceback_is_found(hosted):
    engine = hosted(fuzzed_hosts.prints)
    assert engine.run(numbered(1))["problems"] == [(TRACE, "a traceback: ValueError: of the engine", None)]


def test_an_engine_that_does_not_start_is_one_line(hosted):
    with pytest.raises(Failed, match="did not start: no such model"):
        hosted(fuzzed_hosts.does_not_start).run(numbered(1))


def test_a_sound_engine_has_a_report_without_findings(hosted):
    progress = []
    report = engine_campaign(hosted(fuzzed_hosts.sound), 3, 0.0, pytest.fail, progress.append).values()
    assert report["findings"] == [] and report["problems"] == {} and report["engines_lost"] == report["hangs"] == 0
    assert report["fates"] == {"answered": len(requests_of(3, 0))} and report["mates"] == 3
    assert len(progress) == report["rounds"] == 1
    json.dumps(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "--request", "{"], "--request '{'"),
        (["--engine", "--request", "no/such/file"], "No such file"),
        (["--engine", "--request", '{"way": "window"}'], "give `way` (session, batch, hand)"),
        (["--engine", "--seeds", "3"], "--seeds is not for runs with --engine"),
        (["--minutes", "3"], "--minutes is only for runs with --engine"),
        (["--request", "{}"], "--request is only for runs with --engine"),
    ],
)
def test_wrong_options_are_one_line(options, words):
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 2 and words in result.output and len(result.output.splitlines()) == 1
