"""Routed experts of a group among the inputs of its loss, which are cut and padded with the other columns.

Used by `group_trainer`; they are replayed by `route_replay`.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from tailrace.app.trl.route_replay import padded_routes, replayed_routes
from tailrace.deployments.messages.rollout import GroupResult

PROMPT, ANSWER = "prompt_routes", "completion_routes"
"""Routes among the inputs of a loss, by the names of its other columns."""


def routes_of(group: GroupResult, inputs: dict) -> dict[str, torch.Tensor]:
    """Returns the columns of a group's routes for the inputs of its loss; none if its engines keep none. `inputs`:
    TRL's, with prompts padded on the left and answers on the right.
    """
    routes = [sample.routed_experts for sample in group.samples]
    if all(one is None for one in routes):
        return {}
    prompt, answer = inputs["prompt_ids"], inputs["completion_ids"]
    starts = [prompt.shape[1] - len(group.prompt_token_ids)] * len(routes)
    whole = padded_routes(routes, starts, prompt.shape[1] + answer.shape[1]).to(prompt.device)
    return {PROMPT: whole[:, : prompt.shape[1]], ANSWER: whole[:, prompt.shape[1] :]}


def replayed_inputs(model: torch.nn.Module, inputs: dict) -> AbstractContextManager[None]:
    """Takes the columns of routes out of a pass's inputs. Returns what replays them, see `replayed_routes`."""
    if PROMPT not in inputs:
        return nullcontext()
    return replayed_routes(model, torch.cat([inputs.pop(PROMPT), inputs.pop(ANSWER)], 1))
