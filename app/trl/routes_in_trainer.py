"""Replay of routed experts in a `trl.GRPOTrainer`: in the pass that has the gradient, and in that of the old logprobs.

Routes are one more column of a batch, a list with an entry for each row, which TRL shuffles and splits with the others.
The routers choose for themselves where a row has none, and in a reference model. Made by `attach`; see `route_replay`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch

from tailrace.app.errors import BadInput
from tailrace.app.trl.route_replay import padded_routes, replayed_routes
from tailrace.app.trl.row_routes import RowRoutes
from tailrace.deployments.results.routed_experts import RoutedExperts

ROUTES = "routed_experts"
"""Name of the column."""

SHARE = "sampling/samples_with_routes"
"""Metric of a trainer: the share of this process's samples whose routes are replayed, where any are."""

Routes = Sequence[RoutedExperts | None]


class RoutesInTrainer:
    """Each method below `_wrap` takes the place of the trainer's of that name, whose own is `upstream`; `_whole_pass`
    takes that of `training_step` and of `prediction_step`.

    `rows`: the routes of samples, which are added before the trainer's `_generate` ends.
    """

    def __init__(self, trainer, rows: RowRoutes):
        self._trainer, self._rows = trainer, rows
        self._batch: Routes | None = None  # of the batch that is scored now
        self._pass: ExitStack | None = None  # until the end of the gradient
        for name in ("_generate", "_generate_and_score_completions", "_get_per_token_logps_and_entropies"):
            self._wrap(name, getattr(self, name))
        self._wrap("_compute_loss", self._compute_loss)
        for name in ("training_step", "prediction_step"):
            self._wrap(name, self._whole_pass)

    def _wrap(self, name: str, method: Callable) -> None:
        setattr(self._trainer, name, partial(method, getattr(self._trainer, name)))

    def _generate(self, upstream: Callable, prompts: list):
        made = upstream(prompts)
        prompt_ids, completion_ids = made[:2]
        self._batch = self._rows.take(prompt_ids, completion_ids)
        if any(self._batch) and self._trainer.beta and self._trainer.ref_model is None:
            raise BadInput("the reference model is the trained one without its adapter: set beta to 0 to replay routes")
        return made

    def _generate_and_score_completions(self, upstream: Callable, inputs: list[dict]) -> dict:
        try:
            output, routes = upstream(inputs), self._batch or ()
        finally:
            self._batch = None
        if not any(routes):
            return output
        if len(output["prompt_ids"]) != len(routes):
            name = type(self._trainer).__name__
            raise BadInput(f"{name} trains on some of its samples alone; their routed experts cannot be told apart")
        mode = "train" if self._trainer.model.training else "eval"
        self._trainer._metrics[mode][SHARE].append(sum(map(bool, routes)) / len(routes))
        return output | {ROUTES: list(routes)}

    def _get_per_token_logps_and_entropies(
        self, upstream: Callable, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        """Computes the old logprobs part by part, as upstream does, each with its routes."""
        if self._batch is None or not any(self._batch) or model is self._trainer.ref_model:
            return upstream(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)
        size, found = batch_size or len(input_ids), []
        for first in range(0, len(input_ids), size):
            part = slice(first, first + size)
            with _replayed_rows(model, self._batch[part], attention_mask[part, :-logits_to_keep], input_ids.shape[1]):
                found.append(upstream(model, input_ids[part], attention_mask[part], logits_to_keep, **options))
        return torch.cat([logps for logps, _, _ in found]), None, None

    def _compute_loss(self, upstream: Callable, model, inputs: dict):
        tokens = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        replayed = _replayed_rows(model, inputs.get(ROUTES, ()), inputs["prompt_mask"], tokens)
        if self._pass is None:
            with replayed:
                return upstream(model, inputs)
        self._pass.enter_context(replayed)  # layers that are checkpointed are computed again with the gradient
        return upstream(model, inputs)

    def _whole_pass(self, upstream: Callable, *given, **named):
        with ExitStack() as self._pass:
            self._pass.callback(setattr, self, "_pass", None)
            return upstream(*given, **named)


def _replayed_rows(model, routes: Routes, prompt_mask: torch.Tensor, tokens: int) -> AbstractContextManager[None]:
    """Returns what replays the routes of rows of `tokens` tokens, see `replayed_routes`; nothing if none has any.
    `prompt_mask`: [rows, tokens of a prompt], 0 where it is padded on the left.
    """
    if not any(routes):
        return nullcontext()
    starts = (prompt_mask.shape[1] - prompt_mask.sum(1)).tolist()
    return replayed_routes(model, padded_routes(routes, starts, tokens))
