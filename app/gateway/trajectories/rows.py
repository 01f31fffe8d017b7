"""Training rows of a trajectory: one for each turn that no other continues, from its root on.

Invariant: a sampled token has the mask 1 in exactly one row. A row that begins with the turns of an earlier one has
them as context, with the mask 0.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from tailrace.app.gateway.answers import finite
from tailrace.app.gateway.images.prompt_images import image_features
from tailrace.app.gateway.trajectories.tree import TrajectoryTree
from tailrace.deployments.messages.trajectory import TrajectoryTurn
from tailrace.deployments.results.routed_experts import RoutedExperts


def rows_of(tree: TrajectoryTree, items: Mapping[str, str] = {}) -> list[dict]:
    """Returns the rows. `token_ids`, `mask` and `logprobs` have one value a token; logprobs of tokens that were not
    sampled are 0. `turns`: positions in the row, `[start, end)`, of each answer and of its spans of a weights version.
    `routed_experts`: of all tokens but the last, if the engine keeps them. `features`: of the row's images, if it has
    some. `items`: processed content of the tree's images by their names.
    """
    trained: set[int] = set()
    return [_row(tree, leaf, trained, items) for leaf in tree.leaves()]


def _row(tree: TrajectoryTree, leaf: int, trained: set[int], items: Mapping[str, str]) -> dict:
    token_ids, mask, logprobs, turns = [], [], [], []
    for number in tree.line(leaf):
        turn = tree.turns[number]
        start = len(token_ids) + len(turn.prompt_token_ids)
        token_ids += chain(turn.prompt_token_ids, turn.token_ids)
        mask += [0] * len(turn.prompt_token_ids) + [int(number not in trained)] * len(turn.token_ids)
        logprobs += chain([0.0] * len(turn.prompt_token_ids), map(finite, turn.logprobs))
        spans = [{"version": v, "start": start + first, "end": start + end} for v, first, end in turn.versions]
        turns.append({
            "turn": number, "parent": turn.parent, "start": start, "end": len(token_ids), "weight_versions": spans,
            "finish_reason": turn.finish_reason, "reencoded_tokens": turn.reencoded_tokens,
        })  # fmt: skip
        trained.add(number)
    row = {"token_ids": token_ids, "mask": mask, "logprobs": logprobs, "turns": turns}
    if images := tree.images(leaf):
        features = image_features(images, [items[image.name] for image in images])
        row["features"] = features.model_dump(mode="json", exclude_none=True)
    routes = _routes([tree.turns[number] for number in tree.line(leaf)], [one["end"] for one in turns])
    return row if routes is None else row | {"routed_experts": routes.base64()}


def _routes(turns: Sequence[TrajectoryTurn], ends: Sequence[int]) -> RoutedExperts | None:
    """Returns the routed experts of a row's tokens but the last, or None if a turn has none. `ends`: of the turns in
    the row. A turn may have them from its context's begin on: those of earlier turns made the tokens, and stay.
    """
    found = [turn.routed_experts for turn in turns]
    if any(routes is None for routes in found):
        return None
    whole = np.zeros((ends[-1] - 1, *found[0].array.shape[1:]), found[0].array.dtype)
    for routes, end in zip(reversed(found), reversed(ends), strict=True):
        whole[end - 1 - len(routes) : end - 1] = routes.array
    return RoutedExperts(whole)


def trajectory_body(tree: TrajectoryTree, reward: float | None = None, items: Mapping[str, str] = {}) -> dict:
    """Returns the answer of `GET /v1/trajectories/ID`. `items`: as in `rows_of`."""
    opening, rows = tree.opening, rows_of(tree, items)
    return {
        "id": opening.trajectory_id,
        "seed": opening.settings.seed,
        "step": opening.settings.step,
        "group": opening.group,
        "index": opening.index,
        "reward": reward,
        "rows": rows,
        "turns": len(tree.turns),
        "branches": tree.branches,
        "sampled_tokens": tree.sampled_tokens,
        "reencoded_tokens": sum(turn.reencoded_tokens for turn in tree.turns),
    }
