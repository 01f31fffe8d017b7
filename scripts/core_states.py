"""Writes the table of a sample's states, and the diagram made from it, into docs/architecture.md."""

import re
from pathlib import Path

from tailrace.policies.core.sample_states import TABLE, State

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- core_states: begin -->", "<!-- core_states: end -->"


def name(state: State | None) -> str:
    return "new" if state is None else state.value


def table() -> str:
    """Returns the transitions as a Markdown table."""
    rows = [
        f"| {name(row.state)} | `{row.event}` | {row.condition} | {name(row.then)} | {row.actions} |" for row in TABLE
    ]
    return "\n".join(["| state | event | condition | next | actions |", "|---|---|---|---|---|", *rows])


def diagram() -> str:
    """Returns the transitions that change the state, as a Mermaid state diagram."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for row in TABLE:
        if row.state is not row.then:
            events = arrows.setdefault(("[*]" if row.state is None else row.state.value, row.then.value), [])
            events += [] if row.event in events else [row.event]
    lines = [f"    {state} --> {then}: {', '.join(events)}" for (state, then), events in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "    ended --> [*]", "```"])


def rendered(page: str) -> str:
    """Returns the page with the generated part renewed."""
    block = f"{BEGIN}\n{table()}\n\n{diagram()}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
