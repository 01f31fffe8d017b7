"""The timeline of a recorded run as one picture: replicas as rows above, samples and replicas over time below.

Rows, lanes, colours and signs are those of the page. `tailrace timeline RUN --out x.png` writes it.
"""

from collections.abc import Sequence
from colorsys import hls_to_rgb

from tailrace.app.files.figures import new_figure, save
from tailrace.app.files.output_file import OutputFile
from tailrace.app.style.palette import ACTIVITIES, GONE, PAPER, REFERENCE, SERIES, STRIPS, TAIL
from tailrace.lab.report.curves import over_moments
from tailrace.lab.report.span_columns import Band, drawable
from tailrace.lab.report.span_lanes import lanes_of, sources_of
from tailrace.lab.simulator.report import number, percent, summary, tails
from tailrace.lab.simulator.types import Span
from tailrace.lab.timeline.figures import seconds
from tailrace.lab.timeline.page import MOST_SPANS, drafts, kv, lengths, rows_of
from tailrace.lab.timeline.record import Record
from tailrace.lab.timeline.replica_states import WORDS

STRIP = 0.07
"""Of a row's height."""

MOST_MOVES = 1500
"""Lines: with more of them only those of the tail's samples are drawn, then none."""

MOST_NAMED = 40
"""Rows whose names have room."""


def picture(file: OutputFile, title: str, record: Record, bands: Sequence[Band]) -> None:
    rows = len(record.names)
    spans = drawable({"run": record.run}, MOST_SPANS)["run"]
    lanes = lanes_of(spans)
    tall = min(14.0, max(2.0, rows * max(0.5, 0.08 * max(lanes, default=0))))
    figure, (above, below, last) = new_figure(14, tall + 5.2, 3, 1, sharex=True, height_ratios=(tall, 1.8, 1.8))
    _rows(above, record, bands)
    _spans(above, record, list(bands), spans, lanes)
    _curves(below, record)
    _drafts_and_kv(last, record)
    for axes in (above, below, last):
        for begin_s, end_s in tails(record.run.ended):
            axes.axvspan(begin_s, end_s, color=TAIL, linewidth=0, zorder=0.5)
        for at_s, version in record.weights[1:]:
            axes.axvline(at_s, color="black", linewidth=1)
            axes.annotate(f"weights {version}", (at_s, 1), xycoords=("data", "axes fraction"), fontsize=7, va="top")
    said = summary(record.run)
    above.set_title(
        f"{title}: {seconds(said['makespan_s'])} s, tail {seconds(said['tail_s'])} s ({percent(said['tail_share'])}, "
        f"shaded), {number(said['replica_s'])} replica-seconds, moves: {said['moves']:,}, races: {len(record.races):,}",
        loc="left",
    )
    save(figure, file)


def _rows(axes, record: Record, bands: Sequence[Band]) -> None:
    """The activity of each replica: a strip below its samples. Times at which it was not up are filled with grey."""
    from matplotlib.patches import Patch

    rows = len(record.names)
    axes.set(xlim=(0, record.run.makespan_s or 1.0), ylim=(rows, 0), facecolor=PAPER)
    every = max(1, -(-rows // MOST_NAMED))
    named = range(0, rows, every)
    axes.set_yticks([row + 0.45 for row in named], [record.names[row] for row in named], fontsize=8)
    gone = [(begin_s, end_s, row, 1.0) for row in range(rows) for begin_s, end_s in absences(record, row)]
    _boxes(axes, gone, [GONE] * len(gone), 0.2)
    strips = [(b.begin_s, b.end_s, b.replica + 0.9 - STRIP / 2, STRIP) for b in bands]
    _boxes(axes, strips, [ACTIVITIES[b.role] for b in bands], 1)
    there = {band.role for band in bands}
    key = [Patch(color=ACTIVITIES[role], label=WORDS[role]) for role in STRIPS if role in there]
    key += [Patch(color=GONE, label="not up"), Patch(color=TAIL, label="tail")]
    key += [Patch(facecolor=PAPER, edgecolor=REFERENCE, hatch="////", label="race lost, or undecided")] * bool(
        record.races
    )
    axes.legend(
        handles=key, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, title="strip of a row", frameon=False
    )


def absences(record: Record, row: int) -> list[tuple[float, float]]:
    """(begin_s, end_s) of each time in the run in which the replica was not up."""
    found, since_s = [], 0.0
    for lifetime in record.lifetimes[row]:
        found.append((since_s, lifetime.begin_s))
        since_s = lifetime.end_s
    found.append((since_s, record.run.makespan_s))
    return [(begin_s, end_s) for begin_s, end_s in found if begin_s < end_s]


def _spans(axes, record: Record, bands: list[Band], spans: Sequence[Span], lanes: Sequence[int]) -> None:
    late = rows_of(record, bands).last
    shown = sorted({span.sample_id for span in spans})
    places = {sample_id: place for place, sample_id in enumerate(shown)}
    places |= {sample_id: place for place, sample_id in enumerate((one for one in shown if one in late), start=1)}
    deep = (0.9 - STRIP / 2) / (max(lanes, default=0) + 1)
    middles = [span.replica + (lane + 0.5) * deep for span, lane in zip(spans, lanes, strict=True)]
    boxes = [(s.begin_s, s.end_s, middle - 0.45 * deep, 0.9 * deep) for s, middle in zip(spans, middles, strict=True)]
    colours = [_colour(places[s.sample_id], s.sample_id in late, 0.4 if s.role == "prefill" else 1.0) for s in spans]
    _boxes(axes, boxes, colours, 2)
    undone = [box for box, span in zip(boxes, spans, strict=True) if span.role in ("lost", "race")]
    _boxes(axes, undone, ["none"] * len(undone), 3, hatch="////", edgecolors="white", linewidth=0)
    for role, sign in (("won", "*"), ("lost", "x")):
        at = [(span.end_s, middle) for span, middle in zip(spans, middles, strict=True) if span.role == role]
        if at:
            axes.scatter(*zip(*at, strict=True), marker=sign, s=45, color="black", zorder=5, linewidth=1, clip_on=False)
    moves = [(source, place) for place, source in enumerate(sources_of(spans)) if source is not None]
    if len(moves) > MOST_MOVES:
        moves = [pair for pair in moves if spans[pair[0]].sample_id in late]
    faint = min(0.75, max(0.15, 60 / max(1, len(moves))))
    for a, b in moves if len(moves) <= MOST_MOVES else ():
        xs = (min(spans[a].end_s, spans[b].begin_s), spans[b].begin_s)
        axes.plot(xs, (middles[a], middles[b]), color="black", linewidth=0.6, alpha=faint, zorder=4)


def _boxes(axes, boxes: Sequence[tuple], colours: Sequence, zorder: float, **how) -> None:
    """(begin, end, top, height) each."""
    from matplotlib.collections import PolyCollection

    corners = [((x0, y), (x1, y), (x1, y + h), (x0, y + h)) for x0, x1, y, h in boxes]
    drawn = PolyCollection(corners, facecolors=colours, zorder=zorder, **({"linewidth": 0} | how))
    drawn.set_snap(False)  # boxes thinner than a pixel would come and go
    axes.add_collection(drawn)


def _colour(place: int, vivid: bool, alpha: float) -> tuple:
    light, strong = (0.44, 0.78) if vivid else (0.78, 0.48)
    return (*hls_to_rgb(place * 137.508 % 360 / 360, light, strong), alpha)


def _curves(axes, record: Record) -> None:
    for field, colour in (("running", SERIES[1]), ("waiting", SERIES[2])):
        points = over_moments(record.run, field)
        axes.step(*zip(*points, strict=True), where="post", color=colour, label=f"samples {field}", linewidth=1.3)
    axes.set(ylabel="samples", ylim=(0, None))
    up = axes.twinx()
    up.step(
        *zip(*over_moments(record.run, "replicas"), strict=True), where="post", color=REFERENCE, label="replicas up"
    )
    if record.asked:
        asked = [(at_s, replicas) for at_s, replicas, _ in record.asked if at_s <= record.run.makespan_s]
        up.step(*zip(*asked, strict=True), where="post", color=REFERENCE, linestyle=":", label="replicas asked for")
    most = max(moment.replicas for moment in record.run.moments)
    up.set(ylabel="replicas", ylim=(0, max(4, 1.1 * most)))
    up.yaxis.get_major_locator().set_params(integer=True)
    _name_lines(axes, up)


def _drafts_and_kv(axes, record: Record) -> None:
    """Tokens of a step where the journal holds steps, or else the share of accepted drafts; and KV so far."""
    found = lengths(record)["a step"]
    share = [] if found else drafts(record)["accepted"]
    for points, said in ((found, "tokens in an engine step"), (share, "draft tokens accepted, share")):
        if points:
            axes.plot(*zip(*points, strict=True), color=SERIES[1], label=said, linewidth=1.3)
    axes.set(xlabel="seconds", ylabel="drafts", ylim=(0, None))
    tokens = axes.twinx()
    for (said, points), style in zip(kv(record).items(), ("-", ":"), strict=True):
        if points:
            xs, ys = zip(*points, strict=True)
            tokens.step(xs, ys, where="post", color=REFERENCE, linestyle=style, label=f"KV tokens {said}, so far")
    tokens.set(ylabel="context tokens", ylim=(0, None))
    _name_lines(axes, tokens)


def _name_lines(axes, other) -> None:
    handles = [line for line in (*axes.get_lines(), *other.get_lines()) if not line.get_label().startswith("_")]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.08, 1.0), fontsize=8, frameon=False)
