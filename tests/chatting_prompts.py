"""Prompts of chats on the simulated cluster. Needs Ray, so it is for live tests."""

from tailrace.lab.fuzz.cluster import SimulatedPrompts
from tailrace.lab.fuzz.token_law import EOS


class ChattingPrompts(SimulatedPrompts):
    """A chat is its messages' numbers in a row, those of a user after a 3; each answer is a 9 after a 4."""

    closing = str(EOS)

    def chat(self, messages, add_generation_prompt=True, **template) -> str:
        numbers = [f"3 {one['content']} {EOS}" if one["role"] == "user" else f"4 9 {EOS}" for one in messages]
        return " ".join([*numbers, "4"] if add_generation_prompt else numbers)

    def piece(self, token_id: int) -> str:
        return str(token_id)
