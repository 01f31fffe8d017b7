"""Anthropic's tool runner, over the Messages API: asked once, answers once.

The package finds its service by ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. `--stream`: events instead of whole answers.
"""

import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def look(place: str) -> str:
    """Looks at a place.

    Args:
        place: its name.
    """
    return f"{place} is quiet."


runner = Anthropic().beta.messages.tool_runner(
    model="any",
    max_tokens=400,
    max_iterations=8,
    stream="--stream" in sys.argv,
    tools=[look],
    messages=[{"role": "user", "content": "Is the harbour quiet?"}],
)
for answer in runner:
    message = answer.get_final_message() if "--stream" in sys.argv else answer
print(message.content[-1].text)
