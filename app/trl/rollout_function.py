"""TRL's documented extension point: `GRPOTrainer(..., rollout_func=tailrace.rollout_function(client))`.

TRL 1.16 neither syncs weights for it nor corrects for the sampling engine; this function sends the weights by itself.
With `attach` TRL does both, and runs tools. Prompts come repeated, unlike TRL's own description.
"""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.trl.step_rollout import StepRollout


def rollout_function(
    client: RolloutClient, weights_dir: Path | str | None = None, **options
) -> Callable[[list, object], dict]:
    """Returns a `rollout_func` for `trl.GRPOTrainer`. `weights_dir`, `options`: those of `StepRollout`.

    Its answer also has `weights_version` and `finish_reason`, which reward functions get as keyword arguments.
    """
    state: dict[str, object] = {}

    def rollout(prompts: list, trainer) -> dict:
        if "rollout" not in state:
            state["rollout"] = StepRollout(trainer, client, weights_dir=weights_dir, **options)
        if state.get("step") != trainer.state.global_step:
            state["rollout"].send_weights()
            state["step"] = trainer.state.global_step
        token_ids, _, _ = trainer._tokenize_prompts(prompts)
        groups = [(ids, len(list(same))) for ids, same in groupby(token_ids)]
        per_group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        wanted = [ids for ids, count in groups for _ in range(count // per_group)]
        if len(wanted) * per_group != len(prompts):
            raise ValueError(f"{len(prompts)} prompts are not groups of {per_group} equal ones")
        samples = [sample for group in state["rollout"].samples(wanted, per_group) for sample in group]
        return {
            "prompt_ids": token_ids,
            "completion_ids": [list(sample.token_ids) for sample in samples],
            "logprobs": [list(sample.logprobs) for sample in samples],
            "weights_version": [sample.segments[-1].weights_version for sample in samples],
            "finish_reason": [str(sample.finish_reason) for sample in samples],
        }

    return rollout
