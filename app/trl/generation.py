"""The generator of a `GRPOTrainer`, replaced: TRL tokenizes, syncs weights, runs tools and corrects as before.

    trainer = GRPOTrainer(...)                                # with use_vllm=False
    tailrace.attach(trainer, tailrace.connect())
    trainer.train()

Takes the place of `trl.generation.vllm_generation.VLLMGeneration`, of which a trainer uses `sync_weights` and
`generate`. With it, TRL treats samples as another engine's: `vllm_importance_sampling_correction` and the metrics
`sampling/...` apply. If the engines keep routed experts, the trainer replays them, see `routes_in_trainer`.
"""

from pathlib import Path
from typing import NamedTuple

from tailrace.app.calls.client import RolloutClient
from tailrace.app.errors import BadInput
from tailrace.app.trl.processes import for_all
from tailrace.app.trl.row_routes import RowRoutes
from tailrace.app.trl.step_rollout import StepRollout
from tailrace.deployments.results.routed_experts import RoutedExperts


class Made(NamedTuple):
    """A sample, as far as processes of a trainer tell each other."""

    token_ids: list[int]
    logprobs: list[float]
    routes: RoutedExperts | None


def attach(
    trainer, client: RolloutClient, weights_dir: Path | str | None = None, seed: int | None = None
) -> StepRollout:
    """Makes Tailrace generate for a `trl.GRPOTrainer` that was made with `use_vllm=False`.

    `weights_dir`: a folder for the trainer's weights that all nodes see; without one they go through memory. `seed`:
    part of every sample key; the trainer's by default. Raises BadInput for unsupported settings.
    """
    if trainer.use_vllm:
        raise BadInput("the trainer was made with use_vllm=True, so it has an engine of its own; leave that out")
    if trainer.rollout_func is not None:
        raise BadInput("the trainer has a rollout_func; it would be called in place of the service")
    if trainer.tools and trainer.accelerator.num_processes > 1:  # each process's loop of tools has turns of its own
        raise BadInput("tools with several processes: TRL calls for turns in each process by itself; train with one")
    from tailrace.app.trl.routes_in_trainer import RoutesInTrainer  # it loads torch

    seed = trainer.args.seed if seed is None else seed
    rollout, routes = StepRollout(trainer, client, weights_dir=weights_dir, seed=seed), RowRoutes()
    RoutesInTrainer(trainer, routes)
    trainer.use_vllm, trainer.vllm_generation = True, ServiceGeneration(trainer, rollout, routes)
    trainer.vllm_mode = "server"  # else tools would read the longest prompt from the engine object
    trainer._last_loaded_step = -1  # TRL syncs where this is not the present step
    return rollout


class ServiceGeneration:
    """Upstream symbol: `VLLMGeneration`. `routes`: gets the routed experts of this process's samples."""

    def __init__(self, trainer, rollout: StepRollout, routes: RowRoutes):
        self._trainer, self._rollout, self._routes = trainer, rollout, routes

    def sync_weights(self) -> None:
        """Sends the weights. Called by the trainer before the first samples of each step, in every process."""
        self._rollout.send_weights()

    def generate(self, prompts: list[list[int]], images, num_generations: int, profiler=None):
        """Returns (prompt_ids, completion_ids, logprobs, None); logprobs[sample][token] is a list of one float.

        `prompts`: token ids, each `num_generations` times in a row. Raises BadInput if they hold images.
        """
        if images is not None and any(images):
            raise BadInput("prompts with images: the service takes text alone")
        if self._trainer.accelerator.num_processes > 1:
            made = self._rolled_out_for_all(prompts, num_generations)
        else:
            made = self._rolled_out(prompts, num_generations)
        completions = [one.token_ids for one in made]
        if any(one.routes is not None for one in made):
            for prompt, one in zip(prompts, made, strict=True):
                self._routes.add(prompt, one.token_ids, one.routes)
        return prompts, completions, [[[value] for value in one.logprobs] for one in made], None

    def _rolled_out_for_all(self, prompts: list[list[int]], num_generations: int) -> list[Made]:
        """Returns this process's part of one batch for all processes: a group may be spread over several."""
        from accelerate.utils import gather_object

        accelerator = self._trainer.accelerator
        all_prompts = gather_object(prompts)
        made = for_all(accelerator, lambda: self._rolled_out(all_prompts, num_generations))
        first = accelerator.process_index * len(prompts)
        return made[first : first + len(prompts)]

    def _rolled_out(self, prompts: list[list[int]], num_generations: int) -> list[Made]:
        """Returns every sample, in the order of `prompts`."""
        groups = prompts[::num_generations]
        repeated = [prompt for prompt in groups for _ in range(num_generations)]
        if repeated != prompts:
            raise BadInput(f"{len(prompts)} prompts are not groups of {num_generations} equal ones")
        samples = [sample for group in self._rollout.samples(groups, num_generations) for sample in group]
        return [Made(list(one.token_ids), list(one.logprobs), one.routed_experts) for one in samples]
