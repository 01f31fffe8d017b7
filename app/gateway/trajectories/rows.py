"""Training rows of a trajectory: one for each turn that no other continues, from its root on.

Invariant: a sampled token has the mask 1 in exactly one row. A row that begins with the turns of an earlier one has
them as context, with the mask 0.
"""

from itertools import chain

from tailrace.app.gateway.answers import finite
from tailrace.app.gateway.trajectories.tree import TrajectoryTree


def rows_of(tree: TrajectoryTree) -> list[dict]:
    """Returns the rows. `token_ids`, `mask` and `logprobs` have one value a token; logprobs of tokens that were not
    sampled are 0. `turns`: positions in the row, `[start, end)`, of each answer and of its spans of a weights version.
    """
    trained: set[int] = set()
    return [_row(tree, leaf, trained) for leaf in tree.leaves()]


def _row(tree: TrajectoryTree, leaf: int, trained: set[int]) -> dict:
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
    return {"token_ids": token_ids, "mask": mask, "logprobs": logprobs, "turns": turns}


def trajectory_body(tree: TrajectoryTree, reward: float | None = None) -> dict:
    """Returns the answer of `GET /v1/trajectories/ID`."""
    opening, rows = tree.opening, rows_of(tree)
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
