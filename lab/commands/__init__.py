"""Commands that simulate, verify, disturb or draw; `app/cli.py` lists them."""
