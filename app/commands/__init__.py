"""One command a file; `app.cli` loads a command only when it is called."""
