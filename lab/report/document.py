"""A self-contained HTML document, and the parts that pages are made of. A document fetches nothing.

The data block holds no `<`. The document's content policy lets no script run but ours, which it knows by digest. Texts
are escaped here unless a function's docstring says that it takes markup. Used by the pages of simulations, recorded
runs, the demo and soaks.
"""

import json
from base64 import b64encode
from collections.abc import Collection, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path

from tailrace.app.files.output_file import OutputKind
from tailrace.app.style.palette import style

HEAD = '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-"

PAGE = OutputKind("a page of ours", (HEAD.encode(),), (f'"Content-Security-Policy" content="{POLICY}'.encode(),))

WEB = Path(__file__).parent / "web"
"""Folder of the style sheet, without its colours, and of the parts of the script."""

SCRIPTS = ("spans.js", "drawing.js", "pointing.js")
"""Names of the parts of the script, in this order; they share one scope."""


def document(title: str, body: str, data: dict | None) -> str:
    """Returns the document as text. `body`: markup. `data`: what `timelines` returns, or None for a page without
    timelines.
    """
    script = _script()
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}{digest}'"
    scripts = f'<script type="application/json" id="spans">{_inert(data)}</script>\n<script>{script}</script>\n'
    return (
        f'{HEAD}<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="generator" content="Tailrace">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style()}{_asset('page.css')}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"</main>\n{scripts if data else ''}</body>\n</html>\n"
    )


def table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Returns a table. The first row is the heads; a row's first cell is its name. `left`: columns of words."""
    heads, *body = rows
    kinds = [" class=left" if column in left else "" for column in range(len(heads))]
    head = "".join(f"<th scope=col{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, heads, strict=True))
    lines = []
    for name, *cells in body:
        marked = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], cells, strict=True))
        lines.append(f"<tr><th scope=row>{escape(name)}</th>{marked}</tr>")
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def figure(heading: str, caption: str, content: str) -> str:
    """Returns a figure. `heading`, `caption` and `content` must be markup."""
    said = f"<p>{caption}</p>" if caption else ""
    return f"<figure><figcaption><h3>{heading}</h3>{said}</figcaption>{content}</figure>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Returns a legend from pairs of a class of the style sheet and a text."""
    items = "".join(f'<li class="{colour}"><i></i>{escape(text)}</li>' for colour, text in entries)
    return f"<ul class=key>{items}</ul>"


def panel(index: int, said: str) -> str:
    """Returns the place for the timeline of the data block's run number `index`. `said`: content of the timeline, in
    words.
    """
    canvas = f'<canvas id="run{index}" tabindex="0" role="img" aria-label="{escape(said)}"></canvas>'
    return f'<div class=stack>{canvas}<canvas class=over aria-hidden="true"></canvas></div>'


def interactive(said: str, key: str, panels: Sequence[str]) -> str:
    """Returns timelines with the elements that the script needs. `key` and `panels` are markup."""
    options = "".join(f'<option value="{one}">{one}</option>' for one in ("sample", "role"))
    return (
        f"<p class=soft>{escape(said)} Click a span to mark its sample, drag to zoom. Keys on a timeline: arrows go "
        "from span to span, Enter marks, + and − zoom, 0 shows all, Escape unmarks.</p>"
        f"{key}<div class=controls><label>Mark sample <input id=find autocomplete=off spellcheck=false></label>"
        f"<label>Colour by <select id=colour>{options}</select></label>"
        "<button id=whole type=button>Show all</button></div>"
        f'<output id=told aria-live="polite"></output>{"".join(panels)}<div id=tip hidden></div>'
        "<noscript><p>Timelines are drawn by the page's own script, which is switched off.</p></noscript>"
    )


@cache
def _asset(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    return '"use strict";\n{\n' + "".join(map(_asset, SCRIPTS)) + "}\n"


def _inert(data: dict | None) -> str:
    """Returns JSON that no HTML parser can mistake for markup."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
