"""A real Prometheus for tests, on loopback: over Ray's page, or over the pages of a simulated service."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from waiting import until

from tailrace.deployments.metrics.metric import Metric
from tailrace.kvpool.programs import free_port

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "monitoring"
BOARD = json.loads((FOLDER / "board.json").read_text())


def names_of(metric: Metric) -> set[str]:
    """Of a metric's series."""
    if metric.kind != "histogram":
        return {metric.series}
    return {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}


def program(name: str) -> str:
    """Of Prometheus; the test is skipped where it is not."""
    found = shutil.which(name, path=f"{ROOT / '.prometheus/usr/bin'}") or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: `make tools` brings Debian's, or install the package prometheus")
    return found


def configuration(targets: list[str], folder: Path, interval: str) -> dict:
    """Ours, but for the addresses, and for how often they are asked."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = interval
    config["rule_files"] = [str(FOLDER / "alerts.yml")]
    (job,) = config["scrape_configs"]
    job["file_sd_configs"] = [{"files": [str(folder / "nodes.json")]}]
    (folder / "nodes.json").write_text(json.dumps([{"targets": targets}]))
    return config


@contextmanager
def running(folder: Path, config: Mapping) -> Iterator[str]:
    """Its address. `folder`: for its file and its data, which may hold some."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    port = free_port("127.0.0.1")
    words = ("--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.path=data")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen((program("prometheus"), *words), cwd=folder, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _is_ready(url))
            yield url
        finally:
            process.terminate()
            process.wait(120)


def _is_ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/-/ready", timeout=5).status == 200
    except OSError:
        return False


def asked(url: str, query: str, window: str, at_s: float | None = None) -> dict[str, float]:
    """Values of a query by the labels of their series. `window`: of rates. `at_s`: unix seconds; None: now."""
    words = {"query": query.replace("$__rate_interval", window)} | ({} if at_s is None else {"time": f"{at_s}"})
    answer = json.load(urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode(words)}", timeout=120))
    return {
        " ".join(value for _, value in sorted(one["metric"].items())): float(one["value"][1])
        for one in answer["data"]["result"]
    }


def panels(url: str, window: str, at_s: float | None = None) -> dict[tuple[str, str], dict[str, float]]:
    """Values of every query of the board, by panel and legend."""
    return {
        (panel["title"], target["legendFormat"]): asked(url, target["expr"], window, at_s)
        for panel in BOARD["panels"]
        for target in panel.get("targets", ())
    }


def firing(url: str) -> list[str]:
    """Names of the alerts that fire."""
    alerts = json.load(urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=120))["data"]["alerts"]
    return [one["labels"]["alertname"] for one in alerts if one["state"] == "firing"]


def shown(found: Mapping[tuple[str, str], Mapping[str, float]]) -> str:
    """A line for each query."""
    return "\n".join(
        f"| {title} | {legend} | {', '.join(f'{name or chr(8211)}: {value:.4g}' for name, value in values.items())} |"
        for (title, legend), values in found.items()
    )


def write_history(folder: Path, pages: list[tuple[float, str]]) -> None:
    """Pages of text, each with its unix seconds, as data that a Prometheus in this folder begins with."""
    lines: dict[str, list[str]] = {}
    for at_s, page in pages:
        for line in page.splitlines():
            if not line.startswith("#"):
                series = line.partition("{")[0].partition(" ")[0]
                lines.setdefault(series, []).append(f"{line} {at_s:.3f}")
    (folder / "history.txt").write_text("\n".join([*(line for some in lines.values() for line in some), "# EOF\n"]))
    words = ("tsdb", "create-blocks-from", "openmetrics", "history.txt", "data")
    subprocess.run((program("promtool"), *words), cwd=folder, check=True, capture_output=True)
