"""The board's page: one document with its style and script, which fetches nothing but the board's own streams."""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from tailrace.app.style.palette import style

WEB = Path(__file__).parent / "web"
SCRIPTS = ("parts.js", "tables.js", "curves.js", "sample.js", "board.js")


@cache
def page(recorded: bool = False) -> str:
    """Returns the page. `recorded`: for a recorded run, with a slider, instead of a service."""
    body, sheet = ((WEB / name).read_text(encoding="utf-8") for name in ("board.html", "board.css"))
    script = "\n".join((WEB / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en" data-kind="{"recorded" if recorded else "live"}">\n<head>\n'
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Tailrace</title>\n<style>{style()}{sheet}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
