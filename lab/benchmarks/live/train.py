"""Whole steps of training, rollout and gradients, by one trainer in several modes over the same tokens.

Recorded answers are replayed: engine steps and gradients are really computed, and the trace gives tokens and rewards.
The baselines are static groups without drafts and a trainer that waits (as verl does), and TRL's own generation. Modes
run one after the other on one service. Called by `tailrace bench train`.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile
from tailrace.app.train.feed.modes import Mode, lookahead_of
from tailrace.app.train.record.ledger import LedgerRow
from tailrace.app.train.train_config import TrainConfig
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch
from tailrace.lab.verification.runs import WHOLE
from tailrace.policies.families.kv_on_update import Finish
from tailrace.policies.families.placement import FirstFit
from tailrace.policies.families.registry import Policies

STATIC, TRL, FINISH = "static", "trl", "finish"
MODES = {STATIC: Mode.SYNC} | {mode.value: mode for mode in Mode} | {FINISH: Mode.BOUNDED}
"""The learner's mode of each run over the service, by name."""

MAX_STALENESS = 2
"""Maximum updates between a sample's start and its use, in modes that have such a limit; 1 in the run `finish`."""

NAMES = (*MODES, TRL)

RECORDED = "tailrace.lab.benchmarks.live.recorded_rewards:reward"

Answers = Mapping[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Recorded answers by the token ids of their prompt."""


@dataclass(frozen=True)
class TrainingReplay:
    """A replayed training run. `prompts`: file of prompts for the task. `answers`: recorded answers to each prompt.
    `groups`: prompts of a step. `samples`: samples of a group. `steps`: number of steps that count.
    """

    prompts: Path
    answers: Answers
    groups: int
    samples: int
    max_tokens: int
    steps: int

    def config(self, model: str, mode: Mode, max_staleness: int) -> TrainConfig:
        """Returns the configuration. Each question comes once, so no draft has an answer of an earlier step."""
        task = {"prompts": self.prompts, "chat": False, "reward": RECORDED, "held_out": 0, "train": len(self.answers)}
        trainer = {"shares_cores": True, "max_held_gradients": self.groups - 1, "samples_per_pass": 1}
        return TrainConfig(
            model=model,
            task=task,
            steps=self.steps + 1 + lookahead_of(mode, max_staleness).ahead,
            groups=self.groups,
            samples=self.samples,
            max_tokens=self.max_tokens,
            mode=mode,
            max_staleness=max_staleness,
            checkpoint_every=1000,
            trainer=trainer,
        )


class ReplayingClient:
    """A client whose rollouts replay recorded answers."""

    def __init__(self, client: RolloutClient, answers: Answers):
        self._client, self._answers = client, answers

    def __getattr__(self, name: str):
        return getattr(self._client, name)

    def rollout_blocking(self, batch: RolloutBatch) -> Iterator[GroupResult]:
        """Rolls out the batch, with each group's recorded answers, and yields its groups."""
        groups = tuple(
            group.model_copy(update={"forced_token_ids": self._answers[group.token_ids]}) for group in batch.groups
        )
        return self._client.rollout_blocking(batch.model_copy(update={"groups": groups}))


def measure(file: ServeFile, replay: TrainingReplay, names: Sequence[str], say: Callable[[str], None]) -> dict:
    """Returns `modes` by name: the `figures` of each, and for TRL `step_s` and `idle_share` (None) alone.

    `ratio`: step seconds of static groups over those of the mode. `tokens`: tokens of each step.
    """
    engine = file.application.args.engine
    replicas, cores = file.application.args.replicas.max, engine.cores or 1
    rows: dict[str, list[LedgerRow]] = {}
    with TemporaryDirectory(prefix="tailrace-bench-train-") as folder:
        with service(file, None) as client:
            configured = file.application.policies
            for name in (name for name in MODES if name in names):
                asyncio.run(_prepare(client, policies_of(name, configured)))
                rows[name] = _trained(client, replay, engine.model, name, Path(folder) / name, say)
        modes = {name: figures(of_mode, replicas, cores) for name, of_mode in rows.items()}
        if TRL in names:
            from tailrace.lab.benchmarks.live.train_trl import trl_step_s

            say("trl: TRL's own trainer and generation")
            modes[TRL] = {"step_s": trl_step_s(replay, engine.model, Path(folder) / TRL), "idle_share": None}
    base = modes.get(STATIC)
    for figure in modes.values():
        figure["ratio"] = base and round(base["step_s"] / figure["step_s"], 3)
    return {"cores": replicas * cores, "tokens": [row.tokens for row in next(iter(rows.values()), [])], "modes": modes}


def policies_of(name: str, configured: Policies) -> Policies:
    """Returns the policies of a run. If gradients run beside engines, the last samples gather on few engines."""
    if name == STATIC:
        return Policies(**WHOLE | {"drafting": "off"})
    ends = {"kv_on_update": Finish()} if name == FINISH else {}
    gathers = {} if name == Mode.SYNC else {"placement": FirstFit()}
    return configured.model_copy(update=ends | gathers)


def figures(rows: Sequence[LedgerRow], replicas: int, cores: int) -> dict:
    """Returns the means over steps. `cores`: of a replica. `bound_share`: core-seconds in which engines and the trainer
    are busy, divided by all cores and by the seconds of a step.
    """
    step_s = mean(row.seconds.step for row in rows)
    busy_s = cores * mean(row.replica_s - row.idle_replica_s for row in rows)
    trainer_s = mean(row.trainer_cpu_s for row in rows)
    kinds = {
        kind: round(mean(getattr(row.seconds, kind) for row in rows), 2) for kind in type(rows[0].seconds).model_fields
    }
    return {
        "step_s": round(step_s, 2),
        "idle_share": round(sum(row.idle_replica_s for row in rows) / sum(row.replica_s for row in rows), 3),
        "engine_core_s": round(busy_s, 2),
        "trainer_core_s": round(trainer_s, 2),
        "bound_share": round((busy_s + trainer_s) / (replicas * cores) / step_s, 3),
        "staleness": mean(row.staleness.mean for row in rows),
        "reward": round(mean(row.reward_mean for row in rows), 4),
        "groups_without_gradient": sum(row.groups_without_gradient for row in rows),
        "seconds": kinds,
        "weights": [row.weights_checksum for row in rows],
    }


def _trained(client, replay: TrainingReplay, model: str, name: str, folder: Path, say) -> list[LedgerRow]:
    """Trains, and returns the steps that count. Leaves out the first step, which warms up, and the last steps of modes
    that start samples ahead, which have nothing left to start.
    """
    from tailrace.app.train.record.run_folder import RunFolder
    from tailrace.app.train.run import train
    from tailrace.app.train.task import read_task

    config = replay.config(model, MODES[name], 1 if name == FINISH else MAX_STALENESS)
    say(f"{name}: {config.steps} steps")
    client = ReplayingClient(client, replay.answers)
    rows = train(client, config, read_task(config.task), RunFolder(folder, config), say).rows
    gc.collect()  # a trainer has reference cycles: those of four modes took 15 GB, and Ray killed engines
    return rows[1 : replay.steps + 1]


async def _prepare(client: RolloutClient, policies: Policies) -> None:
    await client.set_policies(policies)
    await client.forget_history()
    await client.reset_caches()
