"""The page of a recorded run: replicas as rows with their activity, curves over time, the longest samples.

Drawn by the simulator's own parts (`app/report/document.py`, `span_columns.py`, `svg_charts.py`), so a live run looks
like a simulated one. `tailrace timeline RUN --out x.html` writes it.
"""

from html import escape

from tailrace.app.report.curves import over_moments
from tailrace.app.report.document import document, figure, interactive, legend, panel, table
from tailrace.app.report.span_columns import BANDS, Band, Rows, drawable, held_share, timelines
from tailrace.app.report.svg_charts import curves
from tailrace.app.simulator.report import number, percent, tails
from tailrace.app.timeline.figures import longest
from tailrace.app.timeline.record import Record
from tailrace.app.timeline.replica_states import ROLES, WORDS

ROW = (
    "A row is a replica, in the order of joining, filled by as many lanes as it ran samples; a sample has one colour "
    "wherever it goes, strong if it ended in the tail. Point at a span for its sample, tokens, seconds and reason."
)
MOST_SPANS = 300_000
"""Of 23 bytes each: 9.2 MB of base64. 16,384 samples in 18 chunks each."""

MOST_RACES, MOST_REPLICAS = 20, 64
"""Rows of tables."""

SIGNS = (
    "★: won a race",
    "×, hatched: lost it, or undecided",
)


def page(title: str, record: Record, bands: list[Band], said: dict) -> str:
    """The page, as text. `said`: the run's `figures`."""
    shown = drawable({"run": record.run}, MOST_SPANS)
    body = [
        f"<h1>{escape(title)}</h1>",
        _headline(said),
        *(f"<p>{escape(note)}</p>" for note in notes(record, said)),
        _replicas(record, bands, shown),
        _over_time(record),
        f"<h2>The longest samples</h2>{table(longest(record), left=(7, 8))}",
        _races(said),
        f"<h2>Activity of each replica</h2>{_roles(said)}",
    ]
    return document(
        title,
        "\n".join(part for part in body if part),
        timelines({"run": record.run}, shown, {"run": rows_of(record, bands)}),
    )


def notes(record: Record, said: dict) -> list[str]:
    """Limits of the journal that a reader must know."""
    found = []
    if said["dropped_entries"]:
        found.append(f"The journal was full: its last {said['dropped_entries']:,} entries were not kept.")
    if said["unended"]:
        found.append(f"{said['unended']:,} samples had not ended where the journal does.")
    return found


def rows_of(record: Record, bands: list[Band]) -> Rows:
    """The parts of the timeline besides spans."""
    ended = record.run.ended
    steps = sorted({sample.step for sample in ended})
    began = dict(zip(steps, tails(ended), strict=True))
    last = {sample.sample_id for sample in ended if sample.ended_s >= began[sample.step][0]}
    return Rows(record.names, bands, list(began.values()), last)


def _headline(said: dict) -> str:
    up_s = sum(one["up_s"] for one in said["replicas"].values())
    busy_s = sum(one["up_s"] * (one["busy_share"] or 0.0) for one in said["replicas"].values())
    busy = percent(busy_s / up_s if up_s else None)
    words = [
        f"<b>{number(said['makespan_s'])} s</b> for {said['samples']:,} samples of {said['tokens']:,} tokens",
        f"the tail {number(said['tail_s'])} s ({percent(said['tail_share'])})",
        f"{len(said['replicas']):,} replicas up for {number(up_s)} replica-seconds, {busy} of them busy",
        f"moves: {said['moves']:,}",
    ]
    if said["races"]:
        won = ", ".join(f"{escape(method)} {count}" for method, count in said["wins"].items())
        words.append(f"races: {len(said['races']):,}" + (f", won by {won}" if won else ""))
    return f"<p class=headline>{'; '.join(words)}</p>"


def _replicas(record: Record, bands: list[Band], shown: dict) -> str:
    spans = record.run.spans
    caption = f"{len(record.names):,} replicas, {len(record.chunks):,} chunks"
    if len(shown["run"]) < len(spans):
        held = percent(held_share(shown["run"], spans))
        caption += f"; joined where they touch, the {len(shown['run']):,} longest spans drawn: {held} of all span time"
    there = {band.role for band in bands}
    key = [(f"b{place}", WORDS[role]) for place, role in enumerate(BANDS) if role in there]
    signs = ["Pale: no token yet", "a thin line: the sample moved, or was copied", *(SIGNS if record.races else ())]
    strip = f"<p class=soft>{escape('; '.join(signs))}. The strip below a row is the replica as a whole:</p>"
    key += [("gone", "not up"), ("tail", "tail: the last 10 % of a batch's samples")]
    stack = figure("", caption, panel(0, f"Timeline: {caption}"))
    return f"<h2>Replicas</h2>{interactive(ROW, strip + legend(key), [stack])}"


def _over_time(record: Record) -> str:
    run = record.run
    x, shaded = (0.0, run.makespan_s, "seconds"), tails(run.ended)
    samples = {"running": over_moments(run, "running"), "waiting": over_moments(run, "waiting")}
    up = {"up": over_moments(run, "replicas")}
    if record.asked:
        wanted = [(at_s, replicas) for at_s, replicas, _ in record.asked if at_s <= run.makespan_s]
        up["asked for"] = [*wanted, (run.makespan_s, wanted[-1][1])] if wanted else []
    charts = []
    for heading, label, least_high, series in (("Samples", "samples", 1, samples), ("Replicas", "replicas", 4, up)):
        high = max([least_high, *(value for points in series.values() for _, value in points)])
        colours = dict(zip(series, ("s1", "s2"), strict=False))
        key = legend([(colours[name], name) for name in series])
        drawn = curves(x, (0.0, 1.05 * high, label), series, colours, stepped=True, shaded=shaded)
        charts.append(figure(heading, "", key + drawn))
    return f"<h2>Over time</h2><div class=charts>{''.join(charts)}</div>"


def _races(said: dict) -> str:
    if not said["races"]:
        return ""
    rows = [["sample", "began s", "took s", "runners", "winner"]]
    longest_first = sorted(said["races"], key=lambda race: race["began_s"] - race["ended_s"])
    for race in longest_first[:MOST_RACES]:
        runners = ", ".join(f"{one['method']} on {one['replica']}" for one in race["runners"])
        winner = "none" if race["winner"] is None else f"{race['winner']['method']} on {race['winner']['replica']}"
        took_s = number(race["ended_s"] - race["began_s"])
        rows.append([race["sample"], number(race["began_s"]), took_s, runners, winner])
    more = len(said["races"]) - MOST_RACES
    left_out = f"<p class=soft>The longest; {more:,} more are in the JSON.</p>" if more > 0 else ""
    return f"<h2>Races</h2>{table(rows, left=(3, 4))}{left_out}"


def _roles(said: dict) -> str:
    """The replicas that were up longest, if there are many."""
    rows = [["replica", "up s", "busy", "tokens", *(f"{WORDS[role]} s" for role in ROLES)]]
    ordered = sorted(said["replicas"].items(), key=lambda item: -item[1]["up_s"])
    kept = dict(ordered[:MOST_REPLICAS])
    for name, one in said["replicas"].items():
        if name in kept:
            cells = [number(one["up_s"]), percent(one["busy_share"]), f"{one['tokens']:,}"]
            rows.append([name, *cells, *(number(one[role]) for role in ROLES)])
    more = len(ordered) - len(kept)
    return table(rows) + (f"<p class=soft>{more:,} more are in the JSON.</p>" if more else "")
