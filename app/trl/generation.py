"""The generator of a `GRPOTrainer`, replaced: TRL tokenizes, syncs weights, runs tools and corrects as before.

    trainer = GRPOTrainer(...)                                # with use_vllm=False
    tailrace.attach(trainer, tailrace.connect())
    trainer.train()

Takes the place of `trl.generation.vllm_generation.VLLMGeneration`, of which a trainer uses `sync_weights` and
`generate`. With it, TRL treats samples as another engine's: `vllm_importance_sampling_correction` and the metrics
`sampling/...` apply.
"""

from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.errors import BadInput
from tailrace.app.trl.processes import for_all
from tailrace.app.trl.step_rollout import StepRollout


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
    seed = trainer.args.seed if seed is None else seed
    rollout = StepRollout(trainer, client, weights_dir=weights_dir, seed=seed)
    trainer.use_vllm, trainer.vllm_generation = True, ServiceGeneration(trainer, rollout)
    trainer.vllm_mode = "server"  # else tools would read the longest prompt from the engine object
    trainer._last_loaded_step = -1  # TRL syncs where this is not the present step
    return rollout


class ServiceGeneration:
    """Upstream symbol: `VLLMGeneration`."""

    def __init__(self, trainer, rollout: StepRollout):
        self._trainer, self._rollout = trainer, rollout

    def sync_weights(self) -> None:
        """Sends the weights. Called by the trainer before the first samples of each step, in every process."""
        accelerator = self._trainer.accelerator
        if not accelerator.is_main_process:
            self._rollout.send_weights()  # its part in gathering them
        for_all(accelerator, self._rollout.send_weights)

    def generate(self, prompts: list[list[int]], images, num_generations: int, profiler=None):
        """Returns (prompt_ids, completion_ids, logprobs, None); logprobs[sample][token] is a list of one float.

        `prompts`: token ids, each `num_generations` times in a row. Raises BadInput if they hold images.
        """
        if images is not None and any(images):
            raise BadInput("prompts with images: the service takes text alone")
        if self._trainer.accelerator.num_processes > 1:
            completions, logprobs = self._rolled_out_for_all(prompts, num_generations)
        else:
            completions, logprobs = self._rolled_out(prompts, num_generations)
        return prompts, completions, logprobs, None

    def _rolled_out_for_all(self, prompts: list[list[int]], num_generations: int):
        """Returns this process's part of one batch for all processes: a group may be spread over several."""
        from accelerate.utils import gather_object

        accelerator = self._trainer.accelerator
        all_prompts = gather_object(prompts)
        completions, logprobs = for_all(accelerator, lambda: self._rolled_out(all_prompts, num_generations))
        first = accelerator.process_index * len(prompts)
        mine = slice(first, first + len(prompts))
        return completions[mine], logprobs[mine]

    def _rolled_out(self, prompts: list[list[int]], num_generations: int):
        """Returns token ids and logprobs of every sample, in the order of `prompts`."""
        groups = prompts[::num_generations]
        repeated = [prompt for prompt in groups for _ in range(num_generations)]
        if repeated != prompts:
            raise BadInput(f"{len(prompts)} prompts are not groups of {num_generations} equal ones")
        samples = [sample for group in self._rollout.samples(groups, num_generations) for sample in group]
        return [list(s.token_ids) for s in samples], [[[value] for value in s.logprobs] for s in samples]
