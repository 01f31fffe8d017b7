"""TRL's GRPO trainer, fed group by group: a micro-batch is one group, and its gradient may begin while others run.

Invariant: gradients are added in an order fixed before the step, so the sum has the same bits however long the groups
took. A loss over all tokens of a step is computed over a constant and scaled after the last group, since the number
is not known before. With samples of earlier weights, their own logprobs are the old ones of the clipped ratio.
"""

import math
from collections.abc import Callable, Sequence

import torch
from trl import GRPOTrainer

from tailrace.app.train.feed.step_feed import StepFeed
from tailrace.app.train.gradient_order import GradientOrder
from tailrace.app.train.held_gradients import HeldGradients
from tailrace.app.train.logprob_mismatch import LogprobMismatch
from tailrace.deployments.messages.rollout import GroupResult

LOSSES_OVER_ALL_TOKENS = ("dapo", "cispo", "vespo")
"""TRL's loss types that divide by the tokens of the whole step (`_compute_loss`, TRL 1.16)."""


OF_ANSWERS = (
    "completion_ids", "completion_mask", "sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps",
    "tool_mask",
)  # fmt: skip
"""Inputs of the loss with a column for each token of an answer; the others but OF_ALL have a row for each sample."""

OF_ALL = ("num_items_in_batch",)
"""Inputs of the loss that are of the whole step."""


class GroupTrainer(GRPOTrainer):
    """Call `feed_by` before `train`. One process; its evaluation is not TRL's, see `evaluation`."""

    def feed_by(
        self,
        feed: StepFeed,
        *,
        rows_of: Callable[[int], Sequence[dict]],
        order_of: Callable[[int], Sequence[int]],
        on_policy: bool,
        max_held: int,
        samples_per_pass: int | None,
        before_group: Callable[[bool], None],
    ) -> None:
        """`rows_of`: a step's inputs for reward functions, by place. `order_of`: of its gradients.

        `max_held`: gradients held for groups that end before their turn. `samples_per_pass`: of a group, in one
        backward pass; None for all. `before_group`: called before each, with whether it is the step's last.
        """
        self._feed, self._rows_of, self._order_of = feed, rows_of, order_of
        self._on_policy, self._max_held, self._before_group = on_policy, max_held, before_group
        self._samples_per_pass = samples_per_pass
        self._held = HeldGradients(self.model.parameters())
        self.use_vllm, self.vllm_generation = True, HandedOver()
        self._last_loaded_step = -1  # TRL calls `sync_weights` where this is not the present step
        tokens = self.args.gradient_accumulation_steps * self.num_generations * self.max_completion_length
        self._divisor = 2.0 ** math.ceil(math.log2(tokens))  # a power of two: dividing by it rounds nothing

    def _prepare_inputs(self, generation_batch):
        """Returns the inputs that `training_step` has prepared. Upstream: generates and scores a whole batch."""
        return generation_batch

    def _next_group(self) -> dict:
        """The inputs of the loss for the next group, in the order of gradients."""
        step, turn = self.state.global_step, self._step % self.args.gradient_accumulation_steps
        if turn == 0:
            self._running = self._feed.begin(step)
            self._order = GradientOrder(self._order_of(step), self._max_held)
            self._losses: dict[int, torch.Tensor] = {}
            self._tokens, self.mismatch = 0, LogprobMismatch()
        self._place = self._next_place()
        self._before_group(turn == self.args.gradient_accumulation_steps - 1)
        self.vllm_generation.group = self._running.group(self._place)
        row = self._rows_of(step)[self._place]
        inputs = self._generate_and_score_completions([dict(row) for _ in range(self.num_generations)])
        self._tokens += int(inputs["num_items_in_batch"])
        inputs["num_items_in_batch"] = torch.tensor(self._divisor, device=self.accelerator.device)
        if not self._on_policy:
            inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        return inputs

    def _next_place(self) -> int:
        while (place := self._order.next(ended := self._running.ended)) is None:
            self._feed.next_group(self._running, len(ended))
        return place

    def training_step(self, model, inputs, num_items_in_batch):
        """One group's gradient. Returns the whole step's loss with the last group, and 0 before.

        TRL's own `inputs` are not used: which questions a step has is fixed by `rows_of`.
        """
        passes = parts(self._next_group(), self._samples_per_pass)
        in_turn = self._order.compute(self._place)
        apart = not in_turn or len(passes) > 1  # a sum of passes has the same bits wherever it is added
        if apart:
            self._held.set_sum_aside()
        # TRL's own `training_step` counts calls and prepares inputs; the one above it computes.
        losses = [super(GRPOTrainer, self).training_step(model, each, num_items_in_batch) for each in passes]
        self._losses[self._place] = torch.stack(losses).sum()
        if apart:
            self._held.hold(self._place)
            if in_turn:
                self._held.add(self._place)
        while (place := self._order.due()) is not None:
            self._held.add(place)
        self._step += 1
        if self._step % self.args.gradient_accumulation_steps:
            return torch.zeros_like(losses[0])
        factor = self._divisor / max(1, self._tokens) if self.loss_type in LOSSES_OVER_ALL_TOKENS else 1.0
        if factor != 1.0:
            self._held.scale(factor)
        self._feed.end(self.state.global_step)
        return torch.stack([self._losses[place] for place in sorted(self._losses)]).sum() * factor

    def _compute_loss(self, model, inputs):
        rollout_logprobs = inputs.pop("sampling_per_token_logps")  # on no account part of an on-policy loss
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        self.mismatch.note(self._trainer_logprobs, rollout_logprobs, mask)
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **options):
        found = super()._get_per_token_logps_and_entropies(*args, **options)
        self._trainer_logprobs = found[0].detach()
        return found


def parts(inputs: dict, samples_per_pass: int | None) -> list[dict]:
    """The inputs of a group cut by samples, the longest first, each part without columns that are all padding.

    Exact for LOSSES_OVER_ALL_TOKENS alone, whose terms are sums over tokens.
    """
    if samples_per_pass is None:
        return [inputs]
    lengths = inputs["completion_mask"].sum(-1)
    found = []
    for rows in torch.split(torch.argsort(lengths, descending=True, stable=True), samples_per_pass):
        width = max(1, int(lengths[rows].max()))
        part = {name: value[rows] if name not in OF_ALL else value for name, value in inputs.items()}
        found.append(part | {name: part[name][:, :width] for name in OF_ANSWERS if name in part})
    return found


class HandedOver:
    """Upstream symbol: `VLLMGeneration`. Answers with the samples of `group`, which have been made."""

    group: GroupResult

    def sync_weights(self) -> None:
        """The feed has sent them."""

    def generate(self, prompts: list[list[int]], images, num_generations: int, profiler=None):
        """Returns (prompt_ids, completion_ids, logprobs, None); logprobs[sample][token] is a list of one float."""
        samples = self.group.samples
        ids = [list(sample.token_ids) for sample in samples]
        return prompts, ids, [[[value] for value in sample.logprobs] for sample in samples], None
