"""The demo: prompts whose answers have a long tail, rolled out twice, and a recording of such a demo.

The small model's answers to these prompts are short, except for a few that never stop: a tail as in training.
"""

from pathlib import Path

PROMPTS = Path(__file__).parent / "prompts.jsonl"
