"""Charts as inline SVG: curves, a histogram, bars with whiskers. Axes have units and round ticks; nothing else is
drawn.

A chart is W units wide, scales with the page, and takes its colours from classes s0 to s6 of the page's style sheet. It
describes its content in words (aria-label). All text from outside is escaped here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from tailrace.app.style.palette import SERIES

Points = Sequence[tuple[float, float]]
Colours = Mapping[str, str]
"""Classes of the style sheet by system, so that a system looks the same in every chart."""

W, H = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
COLOURS = len(SERIES)
"""Number of colours of the palette; the eighth system has the first colour again, with a dashed line."""

BINS = 280
"""Number of columns of a curve: about two pixels each."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis, which maps values from `low` to `high` to pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    label: str
    share: bool = False

    def at(self, value: float) -> float:
        reach = (self.high - self.low) or 1.0
        return round(self.begin + (value - self.low) / reach * (self.end - self.begin), 1)

    def text(self, value: float) -> str:
        return f"{100 * value:.4g} %" if self.share else short(value)


def short(value: float) -> str:
    """Returns a tick's label: 1.5 M, 20 K, 0.25."""
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e4, None)):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}" if suffix else f"{value / 1e3:.4g} K"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns at most `most` + 1 multiples of 1, 2 or 5 times a power of ten, from low to high."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * (1 - 1e-9))
    first, last = -floor(-low / step + 1e-9), floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def thinned(points: Points, high_x: float, bins: int = BINS) -> list[tuple[float, float]]:
    """Returns the first, minimum, maximum and last point of each of `bins` equal stretches of x, in their order. All
    are points of the curve, and no peak is lost.
    """
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(min(bins - 1, int(point[0] / high_x * bins)) if high_x else 0, []).append(point)
    kept = []
    for column in columns.values():
        by_height = sorted(range(len(column)), key=lambda index: (column[index][1], index))
        kept += [column[index] for index in sorted({0, by_height[0], by_height[-1], len(column) - 1})]
    return kept


Reach = tuple[float, float, str]
"""Minimum and maximum value of an axis, and its label with the unit."""


def curves(
    x: Reach,
    y: Reach,
    series: Mapping[str, Points],
    colours: Colours,
    *,
    stepped=False,
    share=False,
    shaded: Points = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draws lines. `stepped`: a value holds until the next point. `share`: y is in per cent. `shaded`: stretches of x.

    `marks`: values of x with a text, drawn as lines across.
    """
    across = Axis(*x[:2], LEFT, W - RIGHT, x[2])
    up = Axis(*y[:2], H - BOTTOM, TOP, y[2], share)
    lines = [
        _rect("shade", across.at(low), TOP, across.at(high) - across.at(low), H - BOTTOM - TOP, "tail")
        for low, high in shaded
    ]
    lines += [_rect("part", across.at(at) - 0.75, TOP, 1.5, H - BOTTOM - TOP, said) for at, said in marks]
    for name, points in series.items():
        path = _path([(across.at(a), up.at(b)) for a, b in thinned(points, across.high)], stepped)
        lines.append(f'<path class="line {colours[name]}" d="{path}"><title>{escape(name)}</title></path>')
    return _chart(f"{y[2]} against {x[2]}: {', '.join(series)}", H, [*_axes(across, up, H), *lines])


def histogram(values: Sequence[float], label: str, count_label: str, bins: int = 40) -> str:
    """Draws the number of values in each of `bins` equal stretches from 0 to the maximum."""
    high = max(values, default=0) or 1
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(value / high * bins))] += 1
    across = Axis(0, high, LEFT, W - RIGHT, label)
    up = Axis(0, max(counts) or 1, H - BOTTOM, TOP, count_label)
    bars = []
    for index, count in enumerate(counts):
        begin, end = across.at(index * high / bins), across.at((index + 1) * high / bins)
        said = f"{short(index * high / bins)} to {short((index + 1) * high / bins)}: {count:,}"
        bars.append(_rect("bar s1", begin, up.at(count), max(0.5, end - begin - 1), H - BOTTOM - up.at(count), said))
    return _chart(f"{count_label} by {label}", H, [*_axes(across, up, H), *bars])


@dataclass(frozen=True, slots=True)
class Bar:
    """`whisker`: minimum and maximum of the value. `part`: length of the last stretch of the bar, drawn darker. `mark`:
    value at which a line crosses the bar.
    """

    name: str
    value: float
    said: str
    whisker: tuple[float, float] | None = None
    part: float = 0.0
    mark: float | None = None


def bars(items: Sequence[Bar], label: str, colours: Colours, reference: float | None = None) -> str:
    """Draws horizontal bars from 0, each with its figure, and a dashed line at `reference`."""
    left, row, height = 130, 30, len(items) * 30 + TOP + BOTTOM
    high = max((max(bar.value, *(bar.whisker or (0,)), bar.mark or 0, reference or 0) for bar in items), default=1)
    across = Axis(0, high or 1, left, W - 130, label)
    parts = _ticks_across(across, height)
    if reference is not None:
        parts.append(_line("bound", across.at(reference), TOP, across.at(reference), height - BOTTOM))
    for index, bar in enumerate(items):
        top, middle, end = TOP + index * row + 5, TOP + index * row + 15, across.at(bar.value)
        parts.append(f'<text class="name" x="{left - 8}" y="{middle + 4}">{escape(_cut(bar.name))}</text>')
        parts.append(_rect(f"bar {colours[bar.name]}", left, top, end - left, 20, f"{bar.name}: {bar.said}"))
        if bar.part:
            begin = across.at(bar.value - bar.part)
            parts.append(_rect("part", begin, top, end - begin, 20, f"{bar.name}: {bar.said}"))
        if bar.mark is not None:
            parts.append(_line("mark", across.at(bar.mark), top - 3, across.at(bar.mark), top + 23))
        if bar.whisker and bar.whisker[0] < bar.whisker[1]:
            low, end = across.at(bar.whisker[0]), across.at(bar.whisker[1])
            parts += [_line("whisker", low, middle, end, middle)]
            parts += [_line("whisker", place, middle - 5, place, middle + 5) for place in (low, end)]
        beside = max(end, across.at(bar.mark or 0)) + 6
        parts.append(f'<text class="value" x="{beside}" y="{middle + 4}">{escape(bar.said)}</text>')
    said = "; ".join(f"{bar.name} {bar.said}" for bar in items)
    return _chart(f"{label}: {said}", height, parts)


def colours_of(systems: Iterable[str]) -> Colours:
    """Returns each system's colour by its place. A system that occurs twice has one colour."""
    places = enumerate(dict.fromkeys(systems))
    return {name: f"s{index % COLOURS}" + (" again" if index >= COLOURS else "") for index, name in places}


def _chart(said: str, height: float, parts: Sequence[str]) -> str:
    label = escape(said)
    return f'<svg viewBox="0 0 {W} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _axes(across: Axis, up: Axis, height: float) -> list[str]:
    parts = _ticks_across(across, height)
    for value in ticks(up.low, up.high, 5):
        y = up.at(value)
        parts.append(_line("grid", across.begin, y, across.end, y))
        parts.append(f'<text class="up" x="{LEFT - 6}" y="{y + 4}">{up.text(value)}</text>')
    middle = (up.begin + up.end) / 2
    parts.append(f'<text class="label" transform="translate(12 {middle:g}) rotate(-90)">{escape(up.label)}</text>')
    return parts


def _ticks_across(across: Axis, height: float) -> list[str]:
    floor_y, parts = height - BOTTOM, []
    for value in ticks(across.low, across.high):
        x = across.at(value)
        parts.append(_line("tick", x, floor_y, x, floor_y + 4))
        parts.append(f'<text class="across" x="{x}" y="{floor_y + 17}">{across.text(value)}</text>')
    parts.append(_line("axis", across.begin, floor_y, across.end, floor_y))
    middle = (across.begin + across.end) / 2
    parts.append(f'<text class="label" x="{middle:g}" y="{floor_y + 34}">{escape(across.label)}</text>')
    return parts


def _path(points: Points, stepped: bool) -> str:
    """Returns a path in absolute moves; a stepped one goes across before it goes up."""
    steps, before = [], None
    for x, y in points:
        if before is None:
            steps.append(f"M{x:g} {y:g}")
        elif (x, y) != before:
            steps.append(f"H{x:g}V{y:g}" if stepped else f"L{x:g} {y:g}")
        before = (x, y)
    return "".join(steps)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def _rect(kind: str, x: float, y: float, width: float, height: float, said: str) -> str:
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect class="{kind}" {size}><title>{escape(said)}</title></rect>'


def _cut(name: str, most: int = 17) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
