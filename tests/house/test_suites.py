"""The bookkeeping of integrations/suites: which tests run, under which model's name, and how two runs are compared."""

import json
import sys
import tomllib

import pytest
from test_imports import ROOT

FOLDER = ROOT / "integrations" / "suites"


@pytest.fixture(autouse=True)
def suites_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("comparison", "fields", "schema", "server_flags", "workspace"):
        sys.modules.pop(name, None)


def outcome(kind: str, reason: str = "") -> dict:
    return {"outcome": kind, "reason": reason, "seconds": 0.1}


def written(folder, **files: dict) -> None:
    for name, outcomes in files.items():
        (folder / f"{name}.json").write_text(json.dumps(outcomes))


def test_a_test_that_passes_on_vllm_serve_alone_is_found(tmp_path, capsys):
    import comparison

    stock = {"t.py::a": outcome("passed"), "t.py::b": outcome("failed", "both"), "t.py::c": outcome("skipped", "a GPU")}
    written(tmp_path, stock=stock, ours={**stock, "t.py::a": outcome("failed", "500 instead of 200")})
    assert comparison.main(tmp_path) == 1
    said = capsys.readouterr().out
    assert "t.py::a: fails on the gateway alone\n    500 instead of 200" in said
    assert "gateway: 0 passed, 2 failed, 1 skipped; vllm serve: 1 passed, 1 failed, 1 skipped; 1 failed on both" in said
    assert "1 skipped: a GPU" in said and "t.py::c" not in said


def test_equal_outcomes_and_tests_that_pass_on_the_gateway_alone_are_no_fault(tmp_path, capsys):
    import comparison

    written(tmp_path, stock={"t.py::a": outcome("failed", "x")}, ours={"t.py::a": outcome("passed")})
    assert comparison.main(tmp_path) == 0
    assert "fails on the vllm serve alone" in capsys.readouterr().out


def test_a_gateway_that_a_known_failure_has_ended_is_no_success(tmp_path, capsys):
    import comparison

    lost = outcome("failed", f"{comparison.LOST}; a known one")
    stock = {"t.py::test_tokenizer_info": outcome("passed"), "t.py::z": outcome("passed")}
    written(tmp_path, stock=stock, ours={"t.py::test_tokenizer_info": lost})
    assert comparison.main(tmp_path) == 1
    assert "known: no such route here" in capsys.readouterr().out


def test_a_test_of_one_file_alone_is_in_the_table():
    import comparison

    table = comparison.rows({"ours": {"t.py::a": outcome("passed")}, "stock": {}})
    assert [(name, ours["outcome"], stock["outcome"]) for name, ours, stock in table] == [
        ("t.py::a", "passed", "not run")
    ]


def test_a_known_reason_is_found_by_pattern():
    import comparison

    known = {r"echo.*logprob": "the prompt is the caller's"}
    assert comparison.known_reason("t.py::test_echo_with_logprobs", known) == "the prompt is the caller's"
    assert comparison.known_reason("t.py::test_logprobs", known) is None


def test_a_flag_that_changes_answers_and_is_not_given_is_missing():
    from server_flags import missing

    suite = {"neutral": ["--dtype", "--enforce-eager"], "given": ["--tool-call-parser=hermes", "--tools"]}
    assert missing(["--dtype", "half", "--enforce-eager", "--tool-call-parser", "hermes", "--tools"], suite) == []
    asked = ["--tool-call-parser", "mistral", "--enforce-eager", "--root-path=/x"]
    assert missing(asked, suite) == ["--tool-call-parser=mistral", "--root-path=/x"]


def test_whole_names_of_models_alone_are_replaced():
    from workspace import substituted

    text = "MODEL = 'a/b'\nOTHER = \"a/b-large\"\n# a/b\nPATH = 'x/a/b'"
    assert substituted(text, ["a/b"], "demo") == "MODEL = 'demo'\nOTHER = \"a/b-large\"\n# a/b\nPATH = 'x/a/b'"


def test_a_folder_without_the_tests_is_refused_with_the_missing_file(tmp_path):
    from workspace import NoCheckout, check

    with pytest.raises(NoCheckout, match=r"has no tests/x\.py: give vLLM at v0\.32\.0"):
        check(tmp_path, {"files": ["x.py"], "package": "vLLM at v0.32.0"})


@pytest.mark.parametrize("name", ["vllm", "openai"])
def test_a_suite_has_all_that_the_runner_reads(name):
    suite = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    assert {"package", "plugins", "copied", "options", "files", "models", "stock_flags", "max_model_len"} < set(suite)
    assert len(set(suite["files"])) == len(suite["files"]) and all(suite["skipped"].values())


def report(**changes) -> dict:
    cases = {"generated": 2100, "with_failures": 0, "errored": 0} | changes.pop("cases", {})
    return {"complete": True, "operations": {"tested": 33}, "test_cases": cases, "failures": []} | changes


@pytest.mark.parametrize(
    ("found", "passed", "words"),
    [
        (report(), True, "2100 cases of 33 operations, 5xx: 0"),
        (report(complete=False), False, "5xx: 0"),
        (report(cases={"errored": 2}), False, "time-outs and lost connections: 2"),
        (
            report(
                cases={"with_failures": 3},
                failures=[{"type": "ServerError", "title": "Server error", "count": 3, "operations": ["GET /health"]}],
            ),
            False,
            "5xx: 3",
        ),
    ],
)
def test_a_run_of_schemathesis_passes_only_if_each_case_did(found, passed, words):
    from schema import summary

    lines, all_passed = summary(found)
    assert all_passed is passed and words in lines[-1]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ('started\n{"engines_lost": 0, "defects": []}\n', []),
        ('{"engines_lost": 2, "defects": ["a loop has ended"]}\n', ["engines lost: 2", "a loop has ended"]),
        ("started\nOSError: no", ["the simulated cluster ended without its report: OSError: no"]),
        ("", ["the simulated cluster ended without its report: "]),
    ],
)
def test_engines_that_a_run_lost_are_told(tmp_path, text, lost):
    from schema import losses

    (tmp_path / "gateway.log").write_text(text)
    assert losses(tmp_path / "gateway.log") == lost
    assert losses(tmp_path / "none.log") == []


def test_answers_are_counted_by_status_over_all_routes():
    from schema import statuses

    from tailrace.app.gateway.metrics import GatewayMetrics

    metrics = GatewayMetrics()
    for route, status in (("/v1/models", 200), ("/tokenize", 200), ("/tokenize", 400)):
        metrics.begin()
        metrics.end(route, status, 0.1)
    assert statuses(metrics.page().decode()) == "answers by status: 200: 2, 400: 1"


def differing(**changes):
    from fields import Difference

    usual = {"route": "/v1/completions", "field": "stop", "value": "", "vllm": "refused: empty", "gateway": "taken"}
    return Difference(**(usual | changes))


def test_a_difference_without_a_reason_is_counted():
    from fields import report

    known = {"null": "null is not given", "refused_here": {"echo": "the caller's"}, "taken_here": {"user": "no effect"}}
    found = [
        differing(),
        differing(value=None),
        differing(field="user", value=3),
        differing(field="user", vllm="taken", gateway="refused: a number"),
        differing(field="echo", vllm="taken", gateway="refused: remove it"),
        differing(field="echo", vllm="taken", gateway="status 500: broken"),
    ]
    lines, open_ones = report(found, known)
    assert open_ones == 3
    assert lines[:2] == ['/v1/completions stop: vLLM refused, gateway taken: ""', "    refused: empty"]
    assert "    known: the caller's" in lines and "    status 500: broken" in lines


@pytest.mark.parametrize("name", ["no_such", "model", "max_tokens"])
def test_a_field_that_no_route_varies_is_refused(monkeypatch, capsys, name):
    import fields

    route = fields.Route("/v1/completions", ["max_tokens", "model", "stop"], dict, dict)
    monkeypatch.setattr(fields, "routes", lambda: [route])
    assert route.varied() == ["stop"]
    with pytest.raises(SystemExit) as ended:
        fields.main(["--field", name, "--url", "http://127.0.0.1:1"])
    assert ended.value.code == 2 and f"--field {name}: no route has" in capsys.readouterr().err


def test_the_reasons_are_of_fields_that_the_page_of_http_has():
    known = tomllib.loads((FOLDER / "fields.toml").read_text())
    page = (ROOT / "docs/http.md").read_text()  # whose table a test holds against vLLM
    fields = {*known["refused_here"], *known["taken_here"]}
    assert not [field for field in fields if f"`{field}`" not in page]
