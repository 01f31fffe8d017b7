"""Samples for TRL's `AsyncGRPOTrainer`: generated and scored by the service while the trainer trains.

    weights = tailrace.AsyncWeights(client)
    worker = tailrace.AsyncRollouts(client, weights, args=args, train_dataset=data, reward_funcs=reward,
                                    processing_class=tokenizer)
    AsyncGRPOTrainer(model, args=args, train_dataset=data, rollout_worker=worker, weight_transfer=weights).train()

Which groups, and when: `async_worker`. One of them: `async_group`.
"""

from collections.abc import Callable, Sequence

from tailrace.app.calls.client import RolloutClient
from tailrace.app.trl.async_group import GroupMaker
from tailrace.app.trl.async_weights import AsyncWeights
from tailrace.app.trl.async_worker import AsyncWorker


class AsyncRollouts(AsyncWorker):
    """A `rollout_worker`, see `AsyncWorker`. `reward_funcs`: one or more of TRL's signature."""

    def __init__(
        self,
        client: RolloutClient,
        weights: AsyncWeights,
        *,
        args,
        train_dataset,
        reward_funcs: Callable | Sequence[Callable],
        processing_class,
        first_group: int = 0,
    ):
        functions = [reward_funcs] if callable(reward_funcs) else reward_funcs
        maker = GroupMaker(client, args=args, tokenizer=processing_class, reward_funcs=functions)
        super().__init__(maker.make, weights, args=args, train_dataset=train_dataset, first_group=first_group)
