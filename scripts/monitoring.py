"""Writes monitoring/board.json, a board for Grafana, and the table of metrics in docs/metrics.md, from the registry.

Every metric has a panel of its own, below the panels that relate several metrics. Queries take a metric's name from its
object in the registry.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tailrace.deployments.metrics import registry as of
from tailrace.deployments.metrics.metric import Metric

ROOT = Path(__file__).parent.parent
BOARD, PAGE = ROOT / "monitoring" / "board.json", ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->"
WINDOW = "$__rate_interval"
BATCHES_WINDOW = "30m"
"""Time over which rates of figures are taken that come with a batch's end."""

SOURCE = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}

UNITS = {"s": "s", "By": "bytes", "1": "short"}
RATE_UNITS = {"s": "short", "By": "Bps", "1": "cps"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 24


class Panel(NamedTuple):
    """A panel of the board. `queries`: each query with the legend of its series. `unit`: Grafana's name of the unit."""

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(metric: Metric, where: str = "", window: str = WINDOW) -> str:
    return f"rate({metric.series}{where}[{window}])"


def share(part: str, whole: str, by: str = "") -> str:
    """Returns the query of a share. It gives nothing where the whole is 0, because the share would be no number."""
    return f"sum{by}({part}) / (sum{by}({whole}) > 0)"


RELATED = (
    Panel(
        "Tail share",
        "Share of their time that batches spend on the last 10 % of their samples, over 30 minutes",
        "percentunit",
        ((share(rate(of.BATCH_SECONDS, '{part="tail"}', BATCHES_WINDOW), rate(of.BATCH_SECONDS, "", BATCHES_WINDOW)),
          "tail"),),
    ),
    Panel(
        "Tokens a second",
        "Made by engines, and of them kept in samples. The difference is copies that lost a race, and lost chunks",
        "cps",
        ((f"sum({rate(of.ENGINE_TOKENS)})", "made"), (f"sum({rate(of.TOKENS)})", "kept")),
    ),
    Panel(
        "Tokens a verification",
        "Tokens that one step makes of one sample; 1 without drafts",
        "short",
        ((share(rate(of.ENGINE_TOKENS), rate(of.VERIFICATIONS)), "tokens"),),
    ),
    Panel(
        "Accepted drafts",
        "Share of the draft tokens that were right, by source",
        "percentunit",
        ((share(rate(of.DRAFT_TOKENS, '{outcome="accepted"}'), rate(of.DRAFT_TOKENS, '{outcome="drafted"}'),
                " by (source) "), "{{source}}"),),
    ),
    Panel(
        "Context computed again",
        "Share of the context tokens of later chunks whose KV was found neither in the engine nor in the pool",
        "percentunit",
        ((share(rate(of.CONTEXT_TOKENS, '{kv="recomputed",cause!="new"}'), rate(of.CONTEXT_TOKENS, '{cause!="new"}')),
          "recomputed"),),
    ),
    Panel(
        "Replicas at work",
        "Share of the replicas' seconds in which chunks ran",
        "percentunit",
        ((share(rate(of.REPLICA_SECONDS, '{state="busy"}'), rate(of.REPLICA_SECONDS)), "busy"),),
    ),
    Panel(
        "Pool in use",
        "Share of its room, by tier",
        "percentunit",
        ((share(of.POOL_USED.series, of.POOL_CAPACITY.series, " by (tier) "), "{{tier}}"),),
    ),
)  # fmt: skip


def alone(metric: Metric) -> Panel:
    """Returns the panel of one metric."""
    by = f" by ({', '.join(metric.labels)}) " if metric.labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    if metric.kind == "histogram":
        within = ", ".join((*metric.labels, "le"))
        buckets = f"sum by ({within}) (rate({metric.name}_bucket[{WINDOW}]))"
        queries = tuple(
            (f"histogram_quantile({quantile}, {buckets})", f"p{quantile * 100:.0f} {legend}".strip())
            for quantile in (0.5, 0.95, 0.99)
        )
        return Panel(metric.name, metric.help, "s", queries)
    if metric.kind == "counter":
        query = f"sum{by}({rate(metric)})", legend or "a second"
        return Panel(metric.name, metric.help, RATE_UNITS[metric.unit], (query,))
    joined = "sum" if metric.labels or metric.unit == "By" else "max"
    return Panel(metric.name, metric.help, UNITS[metric.unit], ((f"{joined}{by}({metric.series})", legend or "now"),))


def rows() -> dict[str, list[Panel]]:
    return {
        "Service": list(RELATED),
        "Each metric of the service": [alone(metric) for metric in of.COORDINATOR],
        "HTTP": [alone(metric) for metric in of.GATEWAY],
    }


def board() -> str:
    """Returns the board as Grafana imports it, in JSON."""
    panels, y = [], 0
    for title, row in rows().items():
        panels.append({"type": "row", "title": title, "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y}, "panels": []})
        y += 1
        for place, panel in enumerate(row):
            down, right = divmod(place * WIDTH, COLUMNS)
            panels.append(drawn(panel, right, y + down * HEIGHT))
        y += HEIGHT * -(-len(row) * WIDTH // COLUMNS)
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    made = {
        "title": "Tailrace",
        "uid": "tailrace",
        "tags": ["tailrace"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [SOURCE]},
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


def drawn(panel: Panel, x: int, y: int) -> dict:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": source, "expr": query, "legendFormat": legend}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def table() -> Iterator[str]:
    yield "| series | kind | labels | meaning |\n|---|---|---|---|\n"
    for metric in of.REGISTRY:
        labels = "; ".join(f"{label}: {', '.join(values) or 'any'}" for label, values in metric.labels.items())
        yield f"| `{metric.series}` | {metric.kind} | {labels} | {metric.help} |\n"


def rendered(page: str) -> str:
    """Returns the page with the present table of metrics between BEGIN and END."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "".join(table()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    BOARD.write_text(board())
    PAGE.write_text(rendered(PAGE.read_text()))
