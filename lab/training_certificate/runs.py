"""The certificate of learning: one training, by the plainest rollout and by one with every change that must not matter.

The reference has one replica, whole samples, no drafts and no pool; rollout and training alternate. The other run has
chunks, moves, drafts from group and history, replicas that start and stop, and gradients that overlap with the rollout.
A replica is killed in one step, a store of the pool in another, and the driver is killed and started again. Called by
`tailrace verify --train`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile, with_engine
from tailrace.app.summary import summarise
from tailrace.app.train.feed.modes import Mode
from tailrace.app.train.record.ledger import LedgerRow
from tailrace.app.train.record.stored_groups import stored_groups
from tailrace.app.train.train_config import TrainConfig
from tailrace.deployments.messages.rollout import GroupResult
from tailrace.deployments.replica_count import fixed
from tailrace.lab.training_certificate.comparison import first_difference
from tailrace.lab.training_certificate.disturbed_steps import DisturbedSteps, end_a_store
from tailrace.lab.training_certificate.driver import TrainingDriver
from tailrace.lab.training_certificate.reward import digest_share
from tailrace.lab.verification.closeness import close_calls_of, sureness, total, work_of
from tailrace.lab.verification.disturbances import kill_a_replica
from tailrace.lab.verification.runs import GROUP, SHRINKS, WHOLE, chunked
from tailrace.lab.verification.services import Service
from tailrace.policies.families.registry import Policies

DISTURBED = {1: kill_a_replica, 2: end_a_store}
"""Disturbances by step, counted from 0."""

KILLED_AFTER = 3
"""Number of steps in the ledger when the driver is killed; it continues from the checkpoint after the second step."""

MIN_STEPS = 4

ORDERED_GROUPS = 3
"""Minimum number of groups with a gradient for which a sum depends on its order: two terms commute."""

PLAIN = WHOLE | {"drafting": "off"}
EVERYTHING = chunked(16, "fixed", "round_robin") | SHRINKS


def training(model: str, steps: int, groups: int, samples: int, max_tokens: int) -> TrainConfig:
    """Returns the configuration: sums of small numbers, with so few questions that later steps have the history of
    earlier ones.

    The reward differs from sample to sample: a group with one reward for all has no gradient, and proves nothing.
    """
    task = {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 3}, "train": 2 * groups, "held_out": 0}
    return TrainConfig(
        model=model,
        task=task | {"reward": f"{digest_share.__module__}:{digest_share.__name__}"},
        steps=steps,
        groups=groups,
        samples=samples,
        max_tokens=max_tokens,
        learning_rate=1e-5,
        checkpoint_every=2,
    )


def measure(file: ServeFile, config: TrainConfig, backwards: bool, say: Callable[[str], None]) -> dict:
    """Trains by both rollouts. Returns the certificate, with the figures of close calls, which are drawn again in both.

    `backwards`: the second run adds gradients in the wrong order, a fault that the comparison must find.
    """
    file = with_engine(file, {"model": config.model, "exactness": "bits", "redraw_close_calls": True})
    with TemporaryDirectory(prefix="tailrace-certificate-") as folder:
        plain = _plain(file, config, Path(folder) / "plain", say)
        everything = _everything(file, config, Path(folder) / "everything", backwards, say)
    tolerance = file.application.args.engine.close_call_tolerance
    return certificate(plain, everything) | sureness(
        [by_step(plain.groups), by_step(everything.groups)], map(total, (plain.work, everything.work)), tolerance
    )


@dataclass(frozen=True)
class TrainingRun:
    """`work`: the engines' counts of draws, see `closeness.work_of`. `notes`: one for each disturbance, which is empty
    if the disturbance did not happen.
    """

    name: str
    seconds: float
    rows: list[LedgerRow]
    groups: list[GroupResult]
    work: Counter[str]
    notes: tuple[str, ...] = ()


def _plain(file: ServeFile, config: TrainConfig, folder: Path, say: Callable[[str], None]) -> TrainingRun:
    say("plain: one replica, whole samples, no drafts, no pool; training by turns")
    began_s = time.monotonic()
    with _service(_one_replica(file)) as (client, address):
        _prepare(client, PLAIN)
        rows = TrainingDriver(config.model_copy(update={"mode": Mode.SYNC}), folder, address).run()
        work = asyncio.run(work_of(client))
    return TrainingRun("plain", time.monotonic() - began_s, rows, stored_groups(folder / "rollouts"), work)


def _everything(
    file: ServeFile, config: TrainConfig, folder: Path, backwards: bool, say: Callable[[str], None]
) -> TrainingRun:
    say("everything: chunks, moves, drafts, replicas that go, overlap, kills")
    began_s = time.monotonic()
    overlapped = {"mode": "overlap", "trainer": {"shares_cores": True, "max_held_gradients": 1}}
    config = TrainConfig.model_validate(config.model_dump() | overlapped)
    with _service(Service(GROUP, elastic=True).of(file, folder)) as (client, address):
        with DisturbedSteps(client, DISTURBED) as disturbed:
            _prepare(client, EVERYTHING)
            driver = TrainingDriver(config, folder, address, backwards)
            kept = len(driver.run(kill_after=KILLED_AFTER))
            killed = f"killed the driver after step {kept}" if driver.was_killed else ""
            say(f"{killed or 'the driver ended before it was killed'}; starting it again")
            rows = driver.run()
        work = asyncio.run(work_of(client))
    notes = (*(disturbed.notes.get(step, "") for step in DISTURBED), killed)
    return TrainingRun(
        name="everything",
        seconds=time.monotonic() - began_s,
        rows=rows,
        groups=stored_groups(folder / "rollouts"),
        work=work,
        notes=notes,
    )


def by_step(groups: list[GroupResult]) -> list[GroupResult]:
    """Returns the groups under names that no other step has."""
    return [group.model_copy(update={"prompt_id": f"{group.step}.{group.prompt_id}"}) for group in groups]


def certificate(plain: TrainingRun, everything: TrainingRun) -> dict:
    """Returns the certificate. `identical`: all steps are the same to the bit, the second run was disturbed as planned,
    and a wrong order of gradients would have shown. `ordered_steps`: number of steps in which a wrong order would show.
    """
    difference = first_difference(plain.rows, everything.rows)
    runs = [figures(plain, None), figures(everything, difference)]
    lacks = [key for key in ("chunked_share", "moved_samples", "drafted_tokens") if not runs[1][key]]
    lacks += [f"disturbance {number}" for number, note in enumerate(everything.notes, 1) if not note]
    ordered = sum(row.groups - row.groups_without_gradient >= ORDERED_GROUPS for row in plain.rows)
    lacks += [] if ordered else [f"a step with gradients of {ORDERED_GROUPS} groups"]
    return {
        "identical": difference is None and not lacks,
        "steps": len(plain.rows),
        "tokens": runs[0]["tokens"],
        "ordered_steps": ordered,
        "lacks": lacks,
        "runs": runs,
    }


def figures(run: TrainingRun, difference: dict | None) -> dict:
    """Returns the report of a run."""
    summary, kept = summarise(run.groups), ("samples", "tokens", "chunked_share", "moved_samples", "drafted_tokens")
    found = {"name": run.name, "seconds": round(run.seconds, 1), "first_difference": difference, "notes": run.notes}
    return found | {key: summary[key] for key in kept} | {"close_calls": close_calls_of(run.groups)}


def _prepare(client: RolloutClient, policies: dict) -> None:
    async def prepare() -> None:
        await client.set_policies(Policies(**policies))
        await client.forget_history()

    asyncio.run(prepare())


def _one_replica(file: ServeFile) -> ServeFile:
    wanted = Service(GROUP).of(file, Path())
    return wanted.model_copy(update={"applications": (wanted.application.with_args(replicas=fixed(1), pool=None),)})


@contextmanager
def _service(file: ServeFile) -> Iterator[tuple[RolloutClient, str]]:
    """Yields a client, and the address of its cluster."""
    with service(file, None) as client:
        import ray

        yield client, ray.get_runtime_context().gcs_address
