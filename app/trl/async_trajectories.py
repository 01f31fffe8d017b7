"""Samples for TRL's `AsyncGRPOTrainer`: rows of trajectories, which an agent's harness plays while it trains.

    async def play(trajectory, task) -> float:      # task: a row of the data set
        await run_the_agent(trajectory.base_url, trajectory.api_key, task)
        return await score(task)

    weights = tailrace.AsyncWeights(HttpWeights("http://trainer:TOKEN@127.0.0.1:8000"))
    worker = tailrace.AsyncTrajectories(Client("http://127.0.0.1:8000", TOKEN), weights, play=play, args=args,
                                        train_dataset=tasks, processing_class=tokenizer)
    AsyncGRPOTrainer(model, args=args, train_dataset=tasks, rollout_worker=worker, weight_transfer=weights).train()

Which groups, and when: `async_worker`. One of them: `played_group`.
"""

from collections.abc import Mapping

from tailrace.app.errors import BadInput
from tailrace.app.http.client import Client
from tailrace.app.http.trajectory_groups import Play
from tailrace.app.trl.async_weights import AsyncWeights
from tailrace.app.trl.async_worker import AsyncWorker
from tailrace.app.trl.played_group import GroupPlayer


class AsyncTrajectories(AsyncWorker):
    """A `rollout_worker`, see `AsyncWorker`. `play(trajectory, task)`: a coroutine function, as of
    `Client.trajectory_groups`; it runs on the worker's event loop. `limits`: of each trajectory, as in
    `POST /v1/trajectories`.
    """

    def __init__(
        self,
        client: Client,
        weights: AsyncWeights,
        *,
        play: Play,
        args,
        train_dataset,
        processing_class,
        limits: Mapping[str, float] | None = None,
        first_group: int = 0,
    ):
        _check(client, play)
        player = GroupPlayer(client, play, args=args, tokenizer=processing_class, limits=limits or {})
        settings = {"args": args, "train_dataset": train_dataset, "first_group": first_group}
        super().__init__(player.make, weights, branches=True, **settings)


def _check(client: Client, play: Play) -> None:
    from trl.trainer.utils import is_async_callable

    if not hasattr(client, "trajectory_groups"):
        raise BadInput(f"client is a {type(client).__name__}; trajectories go by HTTP: give a tailrace.http.Client")
    if not is_async_callable(play):
        raise BadInput("play is no coroutine function: write `async def play(trajectory, task)`")
