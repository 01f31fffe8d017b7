"""schemathesis on the gateway's OpenAPI: no 5xx, no time-out, and every answer as the OpenAPI says.

    python integrations/suites/schema.py [--cases N] [--url ADDRESS --token TOKEN] [--out FOLDER] [--seed N]

Without an address it tries the gateway over the simulated cluster: routes, tokenizer and coordinator are the real
ones, engines are not. `--engine` tries a gateway of the demo model on one engine instead. Needs .venv-suites, which
`make test-schema` makes. Exit code: 0 if all cases pass and there were N or more, 1 if not, 2 for bad input.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

PROGRAM = ROOT / ".venv-suites/bin/st"
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method",
)  # fmt: skip
"""Not those of data: a token or a name that a model does not have is valid by the schema, and vLLM reads true as 1."""

LEFT_OUT = r"^/(board/stream|pause|sleep|weight_slots|weights/.*)$"
"""A stream without an end, two routes after which other cases would wait, and those whose slots are Ray's: the
simulated cluster has no Ray."""

CASES_AN_OPERATION = 30
REQUEST_S = 30
START_S = 120.0


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="at least so many, else the run fails")
    parser.add_argument("--url", help="of a gateway that runs already")
    parser.add_argument("--token", default="", help="its trainer's token")
    parser.add_argument("--engine", action="store_true", help="a gateway of the demo model, on one engine")
    parser.add_argument("--only", default=".", help="operations whose path matches this regular expression")
    parser.add_argument("--examples", type=int, default=CASES_AN_OPERATION, help="of random cases for each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/schema"), help="folder of the reports")
    return parser.parse_args(words)


@contextmanager
def simulated(folder: Path, said: Path) -> Iterator[tuple[str, str]]:
    """Address and token of a gateway over the simulated cluster, whose output goes to the file `said`."""
    from simulated import TOKEN

    from tailrace.app.model import resolve_model

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(HERE / "simulated.py"), str(port), str(resolve_model("demo")), str(folder)]
    with said.open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | environment(), stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            await_health(address, server, said)
            yield address, TOKEN
            if server.poll() is not None:
                raise SystemExit(f"the gateway has ended with exit code {server.returncode}")
        finally:
            server.terminate()
            server.wait(timeout=60)


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def await_health(address: str, server: subprocess.Popen, log: Path) -> None:
    """Returns once the server answers. Raises SystemExit if it ends before, or takes longer than START_S."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit(f"no gateway at {address}: {' '.join(log.read_text(errors='replace').splitlines()[-3:])}")


@contextmanager
def gateway(asked: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """Address and token of the gateway that the words ask for."""
    if asked.url:
        yield asked.url, asked.token
    elif asked.engine:
        from servers import running

        with running("ours", folder, [], max_model_len=256) as (address, _):
            yield address, ""
    else:
        with simulated(folder, asked.out / "gateway.log") as found:
            yield found


def command(address: str, token: str, asked: argparse.Namespace) -> list[str]:
    header = ("--header", f"Authorization: Bearer {token}") if token else ()
    return [
        *(str(PROGRAM), "run", f"{address}/openapi.json", *header, "--include-path-regex", asked.only),
        *("--exclude-path-regex", LEFT_OUT, "--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
        *("--max-examples", str(asked.examples), "--request-timeout", str(REQUEST_S), "--seed", str(asked.seed)),
        *("--continue-on-failure", "--output-sanitize", "false", "--report", "json", "--report-dir", str(asked.out)),
    ]


def statuses(page: str) -> str:
    """Answers by status, from the gateway's own figures at /metrics."""
    counts = Counter()
    for status, count in re.findall(
        r'^tailrace_gateway_requests_total\{[^}\n]*status="(\d+)"[^}\n]*\} ([0-9.]+)', page, re.M
    ):
        counts[status] += int(float(count))
    return "answers by status: " + ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))


def page_of(address: str, token: str) -> str:
    request = urllib.request.Request(
        f"{address}/metrics", headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        return answer.read().decode()


def losses(said: Path) -> list[str]:
    """What the simulated cluster lost, from its last line; empty if nothing, or if it was not used. Without that line
    the cluster has failed as it stopped, and nobody knows what it lost.
    """
    if not said.exists():
        return []
    lines = said.read_text(errors="replace").splitlines() or [""]
    if not lines[-1].startswith("{"):
        return [f"the simulated cluster ended without its report: {lines[-1][:200]}"]
    found = json.loads(lines[-1])
    lost = [f"engines lost: {found['engines_lost']}"] if found.get("engines_lost") else []
    return [*lost, *found.get("defects", ())]


def summary(report: dict) -> tuple[list[str], bool]:
    """Lines about a run of schemathesis, and whether each case passed."""
    cases = report["test_cases"]
    errors = {"ServerError": 0, "MalformedJson": 0} | {one["type"]: one["count"] for one in report["failures"]}
    said = [f"{one['count']:5} {one['title']}: {', '.join(one['operations'])}" for one in report["failures"]]
    said.append(
        f"schemathesis: {cases['generated']} cases of {report['operations']['tested']} operations, "
        f"5xx: {errors['ServerError']}, time-outs and lost connections: {cases['errored']}, "
        f"{cases['with_failures']} not as the OpenAPI says"
    )
    return said, report["complete"] and not cases["with_failures"] and not cases["errored"]


def main(words: list[str]) -> int:
    asked = arguments(words)
    if not PROGRAM.exists():
        print(f"{PROGRAM.relative_to(ROOT)} is not there; run: make test-schema", file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    for old in (*asked.out.glob("json-*.json"), *asked.out.glob("gateway.log")):
        old.unlink()
    said = asked.out / "schemathesis.txt"
    with tempfile.TemporaryDirectory(prefix="schema-") as folder, gateway(asked, Path(folder)) as found:
        subprocess.run(command(*found, asked), stdout=said.open("wb"), stderr=subprocess.STDOUT, check=False)
        answers = statuses(page_of(*found))
    reports = sorted(asked.out.glob("json-*.json"))
    if not reports:
        print(f"schemathesis made no report; see {said}", file=sys.stderr)
        return 1
    report = json.loads(reports[0].read_text())
    lines, passed = summary(report)
    lost = losses(asked.out / "gateway.log")
    print("\n".join([*lines, answers, *lost, f"details: {said}"]))
    return 0 if passed and not lost and report["test_cases"]["generated"] >= asked.cases else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
