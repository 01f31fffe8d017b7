"""verl's agent loops, with a name for each request: `tailrace_agent` (one turn), `tailrace_tool_agent` (tools).

Invariant: a request's name is a function of verl's own: prompt, sample, turn and step. Without these loops a request
is named by its id, and its tokens are exact but differ from run to run.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from tailrace_verl.settings import settings

SAMPLING = ("temperature", "top_p", "top_k")


class NamedClient:
    """verl's client, for one trajectory: gives each turn's request its name."""

    def __init__(self, client, names: dict[str, Any], of: int | None):
        self._client, self._names, self._of, self._turn = client, names, of, 0

    async def generate(self, request_id, **kwargs):
        names = dict(self._names)
        if self._turn:
            names["group"] = f"{names['group']}.turn{self._turn}"  # prompts of a group differ from here on
        elif self._of is not None:
            names["of"] = self._of
        self._turn += 1
        return await self._client.generate(request_id, **kwargs, **names)


def names(row: Mapping[str, Any], by_row: bool) -> dict[str, Any]:
    """`group`, `index` and `step` of a trajectory, or nothing if verl gave no `uid`.

    verl 0.9.1 draws another `uid` in each run. `by_row`: name the group by its row of the data set instead, which gives
    the same tokens in each run; a row that comes twice in one step then gives the same tokens twice.
    """
    index = row.get("session_id", row.get("priority"))
    if "uid" not in row or index is None:
        return {}
    group = str(row["uid"])
    if by_row:
        text = f"{row.get('data_source')}\0{row.get('index')}\0{row.get('raw_prompt')}"
        group = f"row-{blake2b(text.encode(), digest_size=12).hexdigest()}"
    return {"group": group, "index": int(index), "step": max(0, int(row.get("global_steps", 0)))}


def group_size(rollout, sampling_params: Mapping[str, Any]) -> int | None:
    """Samples of the prompt, or None if it is not certain: verl does not say whether it trains or validates.

    Their sampling parameters say so where they differ; where both fit, the numbers of samples must be equal.
    """
    given = [sampling_params.get(name) for name in SAMPLING]
    sizes = {kind.n for kind in (rollout, rollout.val_kwargs) if [getattr(kind, name) for name in SAMPLING] == given}
    return sizes.pop() if len(sizes) == 1 else None


class _Named:
    """Put before an agent loop of verl's in the order of classes."""

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        rollout = self.rollout_config
        found = names(kwargs, bool(rollout.get("full_determinism", False)))
        if found:
            whole = settings(rollout.engine_kwargs).whole_groups and "session_id" in kwargs
            of = group_size(rollout, sampling_params) if whole else None
            self.server_manager = NamedClient(self.server_manager, found, of)
        return await super().run(sampling_params, **kwargs)


@register("tailrace_agent")
class TailraceAgentLoop(_Named, SingleTurnAgentLoop):
    """verl's `single_turn_agent`; requests of a prompt join as one group."""


@register("tailrace_tool_agent")
class TailraceToolAgentLoop(_Named, ToolAgentLoop):
    """verl's `tool_agent`; first turns join, later ones are groups of one sample."""
