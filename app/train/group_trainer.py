"""TRL's GRPO trainer, fed group by group: a micro-batch is one group, and its gradient may begin while others run.

Invariant: gradients are added in an order fixed before the step, so the sum has the same bits however long the groups
took and however many are computed at a time. A loss over all tokens of a step is computed over a constant and scaled
after the last group, since the number is not known before. With samples of earlier weights, their own logprobs are
the old ones of the clipped ratio.
"""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import torch
from trl import GRPOTrainer

from tailrace.app.errors import BadInput
from tailrace.app.train.feed.step_feed import StepFeed
from tailrace.app.train.gradients.gradient import Gradient, OrderedSum
from tailrace.app.train.gradients.gradient_order import GradientOrder
from tailrace.app.train.gradients.gradient_workers import GradientWorkers, workers_for
from tailrace.app.train.logprob_mismatch import LogprobMismatch
from tailrace.app.train.route_columns import ANSWER, replayed_inputs, routes_of
from tailrace.app.train.train_config import TrainerConfig
from tailrace.app.train.trl_keys import LOSSES_OVER_ALL_TOKENS
from tailrace.deployments.messages.rollout import GroupResult

OF_ANSWERS = (
    "completion_ids", "completion_mask", "sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps",
    "tool_mask", ANSWER,
)  # fmt: skip
"""Inputs of the loss with a column for each token of an answer; all others except OF_ALL have a row for each sample."""

OF_ALL = ("num_items_in_batch",)
"""Inputs of the loss for the whole step."""


class GroupTrainer(GRPOTrainer):
    """Call `feed_by` before `train`, and `close` after. One process; its evaluation is not TRL's, see `evaluation`."""

    def feed_by(
        self,
        feed: StepFeed,
        *,
        row_of: Callable[[int, int], dict],
        order_of: Callable[[int], Sequence[int]],
        on_policy: bool,
        settings: TrainerConfig,
        before_group: Callable[[bool], None],
    ) -> None:
        """Sets the source of samples. `row_of`: returns the input for reward functions at a step and place.
        `order_of`: returns the order of a step's gradients.

        `before_group`: called before each group, with whether it is the step's last. Raises BadInput if TRL's settings
        have terms of the loss that cannot be computed group by group.
        """
        if (self._entropy_bonus_enabled or self.aux_loss_enabled) and self.loss_type in LOSSES_OVER_ALL_TOKENS:
            raise BadInput(
                f"trl: loss_type {self.loss_type} divides by all tokens of a step, which are not known as it begins; "
                "an entropy bonus or a router's loss would be divided too; use loss_type grpo or dr_grpo with them, "
                "or coefficients of 0 (router_aux_loss_coef, entropy_coef)"
            )
        self._feed, self._row_of, self._order_of = feed, row_of, order_of
        self._on_policy, self._settings = on_policy, settings
        self._before_group = before_group
        self._workers: GradientWorkers | None = None
        self._of_pass = threading.local()
        self.use_vllm, self.vllm_generation = True, HandedOver()
        self._last_loaded_step = -1  # TRL calls `sync_weights` where this is not the present step
        tokens = self.args.gradient_accumulation_steps * self.num_generations * self.max_completion_length
        self._divisor = 2.0 ** math.ceil(math.log2(tokens))  # a power of two: dividing by it rounds nothing

    def close(self) -> None:
        """Ends the threads of gradients."""
        if self._workers is not None:
            self._workers.close()

    def _prepare_inputs(self, generation_batch):
        """Returns the inputs that `training_step` has prepared. Upstream: generates and scores a whole batch."""
        return generation_batch

    def training_step(self, model, inputs, num_items_in_batch):
        """Starts one group's gradient. Returns the whole step's loss with the last group, and 0 before.

        TRL's own `inputs` are not used: `row_of` decides which questions a step has.
        """
        if self._workers is None:
            self._workers = self._workers_on(model)
        turn = self._step % self.args.gradient_accumulation_steps
        if turn == 0:
            self._begin_step()
        self._collect(self._workers.workers)
        is_last = turn == self.args.gradient_accumulation_steps - 1
        self._begin_group(is_last)
        self._step += 1
        return self._end_step() if is_last else torch.zeros((), device=self.accelerator.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs a step with its own loss. Upstream: with its part of a sum, from which NaN is left out or never goes."""
        super().log(logs | {"loss": self.step_loss} if "loss" in logs else logs, start_time)

    def _begin_step(self) -> None:
        step = self.state.global_step
        self._running_step = self._feed.begin(step)
        self._order = GradientOrder(self._order_of(step), self._settings.max_held_gradients)
        self._step_sum = OrderedSum(self._order.places)
        self._group_sums: dict[int, OrderedSum] = {}
        self._running: dict[Future[Gradient], tuple[int, int]] = {}  # to the place and the number of its pass
        self._tokens, self.groups_without_gradient = 0, 0

    def _begin_group(self, is_last: bool) -> None:
        place = self._next_place()
        self._before_group(is_last)
        passes = parts(self._inputs_of(place), self._settings.samples_per_pass)
        self._order.begin(place)
        self._group_sums[place] = OrderedSum(range(len(passes)))
        self.groups_without_gradient += all(map(self._has_no_gradient, passes))
        for number, each in enumerate(passes):
            self._collect(self._workers.workers)
            self._running[self._workers.submit(each)] = place, number

    def _next_place(self) -> int:
        while (place := self._order.next(ended := self._running_step.ended)) is None:
            self._feed.next_group(self._running_step, len(ended))
        return place

    def _inputs_of(self, place: int) -> dict:
        """Returns the inputs of the loss for a group."""
        self.vllm_generation.group = self._running_step.group(place)
        row = self._row_of(self.state.global_step, place)
        inputs = self._generate_and_score_completions([dict(row) for _ in range(self.num_generations)])
        inputs |= routes_of(self.vllm_generation.group, inputs)
        self._tokens += int(inputs["num_items_in_batch"])
        inputs["num_items_in_batch"] = torch.tensor(self._divisor, device=self.accelerator.device)
        if not self._on_policy:
            inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        return inputs

    def _collect(self, may_run: int) -> None:
        """Adds gradients to their sums until at most `may_run` passes are left. Raises a pass's error."""
        while len(self._running) > may_run:
            for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                place, number = self._running.pop(future)
                self._group_sums[place].put(number, future.result())
                if (whole := self._group_sums[place].result) is not None:
                    self._step_sum.put(place, whole)
                    del self._group_sums[place]

    def _end_step(self) -> torch.Tensor:
        self._collect(0)
        whole = self._step_sum.result
        if self.loss_type in LOSSES_OVER_ALL_TOKENS:
            whole.scale(self._divisor / max(1, self._tokens))
        has_none = all(gradient is None for gradient in whole.tensors)  # the optimizer's own moments still move weights
        for parameter, gradient in zip(trained(self.model), whole.tensors, strict=True):
            parameter.grad = torch.zeros_like(parameter) if has_none else gradient
        self.mismatch, self.step_loss = whole.mismatch, whole.loss.item()
        self._feed.end(self.state.global_step)
        return whole.loss

    def _workers_on(self, model) -> GradientWorkers:
        settings = self._settings
        workers = settings.workers or workers_for(settings.threads)
        return GradientWorkers(model, workers, settings.threads, settings.shares_cores, self._gradient_of)

    def _gradient_of(self, model, inputs: dict) -> Gradient:
        """Runs one backward pass, on a thread of the workers; a mixture of experts with those of the rollout, if its
        engines keep them.
        """
        with replayed_inputs(model, inputs):
            if self._has_no_gradient(inputs):
                with torch.no_grad():  # for the metrics
                    loss = self.compute_loss(model, inputs)
                tensors = [None for _ in trained(model)]
            else:
                # TRL's own `training_step` counts calls and prepares inputs; the one above it computes.
                loss = super(GRPOTrainer, self).training_step(model, inputs)
                tensors = take_gradients(model)
        return Gradient(tensors, loss.detach(), self._of_pass.mismatch)

    def _has_no_gradient(self, inputs: dict) -> bool:
        """Returns whether every term of the loss is multiplied by an advantage of 0: all answers had the same
        reward.
        """
        has_other_terms = self.beta or self._entropy_bonus_enabled or self.aux_loss_enabled
        return not has_other_terms and not inputs["advantages"].any()

    def _compute_loss(self, model, inputs):
        rollout_logprobs = inputs.pop("sampling_per_token_logps")  # must never be part of an on-policy loss
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        self._of_pass.mismatch = LogprobMismatch()
        self._of_pass.mismatch.note(self._of_pass.logprobs, rollout_logprobs, mask)
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **options):
        found = super()._get_per_token_logps_and_entropies(*args, **options)
        self._of_pass.logprobs = found[0].detach()
        return found


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Returns the parameters that have gradients."""
    return [each for each in model.parameters() if each.requires_grad]


def take_gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Removes and returns the gradients of a model."""
    taken = [each.grad for each in trained(model)]
    for each in trained(model):
        each.grad = None
    return taken


def parts(inputs: dict, samples_per_pass: int | None) -> list[dict]:
    """Returns the inputs of a group cut by samples, the longest first, each part without columns that are all padding.

    Exact only for LOSSES_OVER_ALL_TOKENS, whose terms are sums over tokens.
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
    """Upstream symbol: `VLLMGeneration`. Returns the samples of `group`, which have been made."""

    group: GroupResult

    def sync_weights(self) -> None:
        """Does nothing: the feed has sent the weights."""

    def generate(self, prompts: list[list[int]], images, num_generations: int, profiler=None):
        """Returns (prompt_ids, completion_ids, logprobs, None); logprobs[sample][token] is a list of one float."""
        samples = self.group.samples
        ids = [list(sample.token_ids) for sample in samples]
        return prompts, ids, [[[value] for value in sample.logprobs] for sample in samples], None
