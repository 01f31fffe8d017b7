"""Commands that show a running service."""
