"""What `make demo` rolls out: a dozen prompts a small model can answer."""

from pathlib import Path

PROMPTS = Path(__file__).parent / "prompts.jsonl"
