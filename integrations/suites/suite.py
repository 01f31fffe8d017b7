"""Other people's tests of an OpenAI server, against the gateway and against `vllm serve` with the same model.

    python integrations/suites/suite.py CHECKOUT [--suite vllm|openai] [--server ours|stock] [--out FOLDER]

Each server runs alone; its outcomes go to FOLDER/ours.json and FOLDER/stock.json, and the table compares the two files
that are there. Exit code: 0 if `known.toml` explains each test that passes on `vllm serve` alone, 1 if not, 2 for
bad input.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import comparison  # noqa: E402 - from this folder
import workspace  # noqa: E402

SUITES = ("vllm", "openai")
ENDED = (0, 1)
"""pytest's exit codes of a run that came to its end."""


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of the tested package: a checkout, or its unpacked source archive")
    parser.add_argument("--suite", choices=SUITES, default="vllm", help="whose tests: vLLM's, or those of the client")
    parser.add_argument("--server", choices=("ours", "stock"), help="one of the two alone")
    parser.add_argument("--out", type=Path, default=Path("out/suites"), help="folder of the outcomes")
    parser.add_argument("--only", default="", help="tests whose names have these words (pytest's -k)")
    parser.add_argument("--url", help="of a server of the demo model that runs already; needs --server")
    found = parser.parse_args(words)
    if found.url and not found.server:
        parser.error("--url needs --server, which names the file of outcomes")
    return found


def play(address: str, model: Path, asked: argparse.Namespace, suite: dict, report: Path) -> None:
    """Runs the tests against one server, whose outcomes go to the report; with `--only` the others' are kept. Raises
    SystemExit if pytest itself failed."""
    before = json.loads(report.read_text()) if asked.only and report.exists() else {}
    made = report.with_suffix(".part")
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        workspace.make(Path(folder), asked.checkout, suite, model)
        command = [
            *(sys.executable, "-m", "pytest", "--tb=native", *suite["options"]),
            *(word for plugin in ("outcomes", *suite["plugins"]) for word in ("-p", plugin)),
            *("--url", address, "--model-name", model.name, "--suite", str(HERE / f"{asked.suite}.toml")),
            *("--report", str(made.resolve()), "-k", asked.only, *(f"tests/{name}" for name in suite["files"])),
        ]
        settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(HERE)}
        settings["TEST_API_BASE_URL"] = f"{address}/v1"  # where the tests of `openai` look
        with report.with_suffix(".log").open("wb") as log:
            ran = subprocess.run(command, cwd=folder, env=os.environ | settings, stdout=log, stderr=log, check=False)
    if ran.returncode not in ENDED:
        raise SystemExit(f"pytest has ended with exit code {ran.returncode}; see {report.with_suffix('.log')}")
    report.write_text(json.dumps(before | json.loads(made.read_text()), indent=1))
    made.unlink()


def main(words: list[str]) -> int:
    asked = arguments(words)
    suite = tomllib.loads((HERE / f"{asked.suite}.toml").read_text())
    try:
        workspace.check(asked.checkout, suite)
    except workspace.NoCheckout as error:
        print(error, file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    for server in (asked.server,) if asked.server else ("ours", "stock"):
        report = asked.out / f"{server}.json"
        if asked.url:
            from tailrace.app.model import resolve_model

            play(asked.url, resolve_model("demo"), asked, suite, report)
            continue
        from servers import running

        with running(server, asked.out, suite["stock_flags"], suite["max_model_len"]) as (address, model):
            play(address, model, asked, suite, report)
    return comparison.main(asked.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
