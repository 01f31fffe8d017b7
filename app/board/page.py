"""The board's page: one document with its style and script, which fetches nothing but the board's own streams."""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from tailrace.app.report.palette import style

WEB = Path(__file__).parent / "web"


@cache
def page() -> str:
    body, sheet, script = ((WEB / name).read_text(encoding="utf-8") for name in ("board.html", "board.css", "board.js"))
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Tailrace</title>\n<style>{style()}{sheet}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
