"""The page of a recorded run: replicas as rows with their activity, curves over time, the longest samples.

The page is drawn by the simulator's own parts (`lab/report/document.py`, `span_columns.py`, `svg_charts.py`), so a live
run looks like a simulated one. `tailrace timeline RUN --out x.html` writes it.
"""

from html import escape
from itertools import accumulate

from tailrace.lab.report.curves import acceptance, over_moments, ratio_over_time
from tailrace.lab.report.document import document, figure, interactive, legend, panel, table
from tailrace.lab.report.span_columns import BANDS, Band, Rows, drawable, held_share, timelines
from tailrace.lab.report.svg_charts import curves
from tailrace.lab.simulator.report import number, percent, tails
from tailrace.lab.timeline.figures import longest, seconds
from tailrace.lab.timeline.record import Record
from tailrace.lab.timeline.replica_states import ROLES, WORDS

ROW = (
    "A row is a replica, in the order of joining, filled by as many lanes as it ran samples; a sample has one colour "
    "wherever it goes, strong if it ended in the tail. Point at a span for its sample, tokens, seconds and reason."
)
MOST_SPANS = 300_000
"""Maximum number of spans of 23 bytes each: 9.2 MB of base64, enough for 16,384 samples in 18 chunks each."""

Series = dict[str, list[tuple[float, float]]]
"""Points over the seconds of the run, by name."""

MOST_RACES, MOST_REPLICAS = 20, 64
"""Maximum numbers of rows of tables."""

SIGNS = (
    "★: won a race",
    "×, hatched: lost it, or undecided",
)


def page(title: str, record: Record, bands: list[Band], said: dict) -> str:
    """Returns the page as text. `said`: the run's `figures`."""
    shown = drawable({"run": record.run}, MOST_SPANS)
    body = [
        f"<h1>{escape(title)}</h1>",
        _headline(said),
        *(f"<p>{escape(note)}</p>" for note in notes(record, said)),
        _replicas(record, bands, shown),
        _over_time(record),
        f"<h2>The longest samples</h2>{table(longest(record), left=(8, 9))}",
        _races(said),
        f"<h2>Activity of each replica</h2>{_roles(said)}",
    ]
    return document(
        title,
        "\n".join(part for part in body if part),
        timelines({"run": record.run}, shown, {"run": rows_of(record, bands)}),
    )


def notes(record: Record, said: dict) -> list[str]:
    """Returns limits of the journal that a reader must know."""
    found = []
    if said["dropped_entries"]:
        found.append(f"The journal was full: its last {said['dropped_entries']:,} entries were not kept.")
    if said["unended"]:
        found.append(f"{said['unended']:,} samples had not ended where the journal does.")
    return found


def rows_of(record: Record, bands: list[Band]) -> Rows:
    """Returns the parts of the timeline besides spans."""
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
        f"<b>{seconds(said['makespan_s'])} s</b> for {said['samples']:,} samples of {said['tokens']:,} tokens",
        f"the tail {seconds(said['tail_s'])} s ({percent(said['tail_share'])})",
        f"{len(said['replicas']):,} replicas up for {number(up_s)} replica-seconds, {busy} of them busy",
        f"moves: {said['moves']:,}",
    ]
    if said["races"]:
        won = ", ".join(f"{escape(method)} {count}" for method, count in said["wins"].items())
        words.append(f"races: {len(said['races']):,}" + (f", won by {won}" if won else ""))
    words += drafts_and_kv(said)
    return f"<p class=headline>{'; '.join(words)}</p>"


def drafts_and_kv(said: dict) -> list[str]:
    """Returns drafts and KV of a run or a replica, in words; the journal may hold neither."""
    words = []
    if said["drafted_tokens"]:
        words.append(f"{percent(said['accepted_share'])} of {said['drafted_tokens']:,} draft tokens accepted")
    if said["acceptance_length"]:
        words.append(f"{number(said['acceptance_length'])} tokens in an engine step")
    if said["pulled_tokens"]:
        words.append(f"KV of {said['pulled_tokens']:,} context tokens pulled, of {said['computed_tokens']:,} computed")
    return words


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
    shown = [
        ("Samples", "", "samples", 1, samples),
        ("Replicas", "", "replicas", 4, up),
        ("Acceptance length", "Tokens made in an engine step.", "tokens", 1, lengths(record)),
        ("Drafts", "Of the draft tokens of chunks that ran at the time.", "share", 0, drafts(record)),
        ("KV of contexts", "When the chunk that needed it began; so far.", "tokens", 1, kv(record)),
    ]
    marks = [(at_s, f"weights {version}") for at_s, version in record.weights[1:]]
    charts = []
    for heading, caption, label, lowest_high, series in shown:
        if not any(series.values()):
            continue
        high = max([lowest_high, *(value for points in series.values() for _, value in points)])
        colours = dict(zip(series, ("s1", "s2"), strict=False))
        key = legend([(colours[name], name) for name in series])
        reach = (0.0, 1.05 * high, label)
        how = {"share": label == "share", "stepped": heading in ("Samples", "Replicas", "KV of contexts")}
        drawn = curves(x, reach, series, colours, shaded=shaded, marks=marks, **how)
        charts.append(figure(heading, caption, key + drawn))
    said = f"<p class=soft>Lines across: {', '.join(said for _, said in marks)}.</p>" if marks else ""
    return f"<h2>Over time</h2>{said}<div class=charts>{''.join(charts)}</div>"


def lengths(record: Record) -> Series:
    """Returns the tokens that an engine step makes of a sample; no points if the journal does not count steps."""
    return {"a step": acceptance(record.run.spans, record.run.makespan_s)}


def drafts(record: Record) -> Series:
    """Returns the share of draft tokens that was accepted."""
    spread = [(c.begin_s, c.end_s, c.accepted_tokens, c.drafted_tokens) for c in record.chunks if c.drafted_tokens]
    return {"accepted": ratio_over_time(spread, record.run.makespan_s)}


def kv(record: Record) -> Series:
    """Returns context tokens so far whose KV was pulled from the pool, and whose KV was computed."""
    chunks = sorted(record.chunks, key=lambda chunk: chunk.begin_s)
    found = {}
    for name, count in (("pulled from the pool", "pulled_tokens"), ("computed", "computed_tokens")):
        sums = list(accumulate(getattr(chunk, count) for chunk in chunks))
        points = [(chunk.begin_s, total) for chunk, total in zip(chunks, sums, strict=True)]
        found[name] = [(0.0, 0), *points, (record.run.makespan_s, sums[-1])] if sums and sums[-1] else []
    return found


def _races(said: dict) -> str:
    if not said["races"]:
        return ""
    rows = [["sample", "began s", "took s", "runners", "winner"]]
    longest_first = sorted(said["races"], key=lambda race: race["began_s"] - race["ended_s"])
    for race in longest_first[:MOST_RACES]:
        runners = ", ".join(f"{one['method']} on {one['replica']}" for one in race["runners"])
        winner = "none" if race["winner"] is None else f"{race['winner']['method']} on {race['winner']['replica']}"
        took_s = seconds(race["ended_s"] - race["began_s"])
        rows.append([race["sample"], seconds(race["began_s"]), took_s, runners, winner])
    more = len(said["races"]) - MOST_RACES
    left_out = f"<p class=soft>The longest; {more:,} more are in the JSON.</p>" if more > 0 else ""
    return f"<h2>Races</h2>{table(rows, left=(3, 4))}{left_out}"


def _roles(said: dict) -> str:
    """Returns the table of replicas, with MOST_REPLICAS rows at most: those that were up longest."""
    made = ("tokens", "drafted", "accepted", "a step", "KV pulled", "computed")
    rows = [["replica", "up s", "busy", *made, *(f"{WORDS[role]} s" for role in ROLES)]]
    ordered = sorted(said["replicas"].items(), key=lambda item: -item[1]["up_s"])
    kept = dict(ordered[:MOST_REPLICAS])
    for name, one in said["replicas"].items():
        if name in kept:
            cells = [seconds(one["up_s"]), percent(one["busy_share"]), f"{one['tokens']:,}"]
            cells += [f"{one['drafted_tokens']:,}", percent(one["accepted_share"]), number(one["acceptance_length"])]
            cells += [f"{one['pulled_tokens']:,}", f"{one['computed_tokens']:,}"]
            rows.append([name, *cells, *(seconds(one[role]) for role in ROLES)])
    more = len(ordered) - len(kept)
    return table(rows) + (f"<p class=soft>{more:,} more are in the JSON.</p>" if more else "")
