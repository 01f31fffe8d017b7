"""One command a file; `app.__main__` loads a command only when it is called."""
