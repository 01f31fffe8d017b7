"""The colours of all pages and pictures. Each role has one colour, with another for a dark screen if needed.

Invariant: the activity of a span and the same activity of a whole replica have the same colour. Systems and series are
coloured by place: neutral grey first, then colours that colour-blind readers distinguish (Okabe and Ito). Pages read
`style()`, pictures the values.
"""

SERIES = ("#767c84", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of systems and curves, by place. The eighth repeats the first, with a dashed line."""

SERIES_DARK = ("#9aa1a9", "#4ba3e3", "#f0813d", "#2cc196", *SERIES[4:])

ACTIVITIES = {
    "generate": "#2b7bb9",
    "prefill": "#e69f00",
    "fetch": "#cc79a7",
    "race": "#d55e00",
    "draft": "#009e73",
    "won": "#a83a00",
    "lost": "#f0b491",
    "closing": "#b0006d",
    "idle": "#d9dde2",
    "other": "#888888",
}
"""Colours of activities of a span or a replica."""

ACTIVITIES_DARK = ACTIVITIES | {"generate": "#4ba3e3", "draft": "#2cc196", "closing": "#e05cae", "idle": "#3a4047"}

SPANS = ("generate", "prefill", "fetch", "race", "draft", "won", "lost")
"""Activities of spans, in the order of the style sheet's r0 to r6; another activity has r7."""

STRIPS = ("generate", "prefill", "race", "draft", "closing", "idle")
"""Activities of a whole replica, in the order of the style sheet's b0 to b5."""

PAPER, GONE, TAIL, WHOLE, PART = "#ffffff", "#c3c8ce", "#0000001a", "#b0c4de", "#ff8c00"
"""Background; a replica that is not up; the shade of a tail; bars of whole times, and the tail's part of them."""

REFERENCE = "#808080"
"""Lines to compare with, and second axes."""

LIGHT = {"paper": PAPER, "ink": "#1b1f24", "soft": "#5b636d", "rule": "#dfe3e8", "mark": "#000", "gone": GONE,
         "tail": TAIL, "dark": "0"}  # fmt: skip
DARK = {"paper": "#15181c", "ink": "#e8eaed", "soft": "#a3abb5", "rule": "#33393f", "mark": "#fff", "gone": "#05070a",
        "tail": "#ffffff1f", "dark": "1"}  # fmt: skip


def style() -> str:
    """Returns the colours as variables of a style sheet. Printed pages and light screens use the light ones."""
    light = _variables(LIGHT, SERIES, ACTIVITIES)
    dark = _variables(DARK, SERIES_DARK, ACTIVITIES_DARK)
    screen = "@media screen and (prefers-color-scheme: dark)"
    return f":root {{ color-scheme: light dark; {light} }}\n{screen} {{ :root:not([data-print]) {{ {dark} }} }}\n"


def _variables(page: dict[str, str], series: tuple[str, ...], activities: dict[str, str]) -> str:
    named = dict(page)
    named |= {f"s{place}": colour for place, colour in enumerate(series)}
    named |= {f"r{place}": activities[name] for place, name in enumerate((*SPANS, "other"))}
    named |= {f"b{place}": activities[name] for place, name in enumerate(STRIPS)}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())
