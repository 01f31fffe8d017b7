"""An agent of OpenAI's `agents` package with a tool, over the Responses API: asked once, answers once.

The package finds its service by OPENAI_BASE_URL and OPENAI_API_KEY. `--stream`: events instead of whole answers.
"""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def look(place: str) -> str:
    """Looks at a place."""
    return f"{place} is quiet."


async def main() -> None:
    set_tracing_disabled(True)  # traces go to OpenAI
    agent = Agent(name="guard", instructions="Look at each place before you answer.", tools=[look], model="any")
    if "--stream" in sys.argv:
        result = Runner.run_streamed(agent, "Is the harbour quiet?", max_turns=8)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "Is the harbour quiet?", max_turns=8)
    print(result.final_output)


asyncio.run(main())
