"""The certificate of learning: one training, by the plainest rollout and by all that must not matter at once.

The reference has one replica, whole samples, no drafts and no pool, and trains by turns. The other run has chunks,
moves, drafts from group and history, replicas that go and come, gradients that overlap with the rollout, a replica
killed in one step, a store of the pool in another, and a driver that is killed and started again. Called by
`tailrace verify --train`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tailrace.app.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile
from tailrace.app.summary import summarise
from tailrace.app.train.certificate.comparison import first_difference
from tailrace.app.train.certificate.disturbed_steps import DisturbedSteps, end_a_store
from tailrace.app.train.certificate.driver import TrainingDriver
from tailrace.app.train.config import TrainConfig
from tailrace.app.train.record.stored_groups import stored_groups
from tailrace.app.verification.disturbances import kill_a_replica
from tailrace.app.verification.runs import GROUP, SHRINKS, WHOLE, chunked
from tailrace.app.verification.services import Service
from tailrace.app.verification.tokens import with_engine
from tailrace.deployments.messages.rollout import GroupResult
from tailrace.policies.families.registry import Policies

DISTURBED = {1: kill_a_replica, 2: end_a_store}
"""By step, counted from 0."""

KILLED_AFTER = 3
"""Steps in the ledger as the driver is killed; it continues from the checkpoint after the second."""

MIN_STEPS = 4

PLAIN = WHOLE | {"drafting": "off"}
EVERYTHING = chunked(16, "fixed", "round_robin") | SHRINKS


def training(model: str, steps: int, groups: int, samples: int, max_tokens: int) -> TrainConfig:
    """Sums of small numbers; there are few questions, so that later steps have the history of earlier ones."""
    task = {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 3}, "train": 2 * groups, "held_out": 0}
    return TrainConfig(
        model=model,
        task=task | {"answer_pattern": r"-?\d+"},
        steps=steps,
        groups=groups,
        samples=samples,
        max_tokens=max_tokens,
        learning_rate=1e-5,
        checkpoint_every=2,
    )


def measure(file: ServeFile, config: TrainConfig, backwards: bool, say: Callable[[str], None]) -> dict:
    """Both runs, and whether they are the same to the bit. `backwards`: a fault, which the comparison must find."""
    file = with_engine(file, {"model": config.model})
    with TemporaryDirectory(prefix="tailrace-certificate-") as folder:
        plain, everything = Path(folder) / "plain", Path(folder) / "everything"
        say("plain: one replica, whole samples, no drafts, no pool; training by turns")
        began_s = time.monotonic()
        with _plain(file) as (client, address):
            _prepare(client, PLAIN)
            expected = TrainingDriver(config.model_copy(update={"mode": "sync"}), plain, address).run()
        plain_s = time.monotonic() - began_s
        say("everything: chunks, moves, drafts, replicas that go, overlap, kills")
        began_s = time.monotonic()
        overlapped = {"shares_cores": True, "max_held_gradients": 1}
        config = TrainConfig.model_validate(config.model_dump() | {"mode": "overlap", "trainer": overlapped})
        with _everything(file, Path(folder)) as (client, address), DisturbedSteps(client, DISTURBED) as disturbed:
            _prepare(client, EVERYTHING)
            driver = TrainingDriver(config, everything, address, backwards)
            begun = driver.run(kill_after=KILLED_AFTER)
            say(f"killed the driver after step {len(begun)}; starting it again")
            got = driver.run()
        everything_s = time.monotonic() - began_s
        runs = [
            figures("plain", plain_s, stored_groups(plain / "rollouts"), None, []),
            figures(
                "everything", everything_s, stored_groups(everything / "rollouts"), first_difference(expected, got),
                [disturbed.notes.get(step, "") for step in DISTURBED] + [f"killed the driver after step {len(begun)}"],
            ),
        ]  # fmt: skip
    return certificate(runs, len(expected))


def figures(name: str, seconds: float, groups: list[GroupResult], difference: dict | None, notes: list[str]) -> dict:
    """The report of a run."""
    summary = summarise(groups)
    kept = ("samples", "tokens", "chunked_share", "moved_samples", "drafted_tokens")
    return {"name": name, "seconds": round(seconds, 1), "first_difference": difference, "notes": notes} | {
        key: summary[key] for key in kept
    }


def certificate(runs: list[dict], steps: int) -> dict:
    """`identical`: all steps are the same to the bit, and the second run was disturbed as planned."""
    plain, everything = runs
    lacks = [key for key in ("chunked_share", "moved_samples", "drafted_tokens") if not everything[key]]
    lacks += [f"disturbance {number}" for number, note in enumerate(everything["notes"], 1) if not note]
    return {
        "identical": everything["first_difference"] is None and not lacks,
        "steps": steps,
        "tokens": plain["tokens"],
        "lacks": lacks,
        "runs": runs,
    }


def _prepare(client: RolloutClient, policies: dict) -> None:
    async def prepare() -> None:
        await client.set_policies(Policies(**policies))
        await client.forget_history()

    asyncio.run(prepare())


@contextmanager
def _plain(file: ServeFile) -> Iterator[tuple[RolloutClient, str]]:
    wanted = Service(GROUP).of(file, Path())
    application = wanted.application
    engine = application.of("Engine").model_copy(update={"num_replicas": 1})
    args = application.args.model_copy(update={"pool": None})
    deployments = tuple(engine if one.name == "Engine" else one for one in application.deployments)
    changed = application.model_copy(update={"args": args, "deployments": deployments})
    with _service(wanted.model_copy(update={"applications": (changed,)})) as both:
        yield both


@contextmanager
def _everything(file: ServeFile, folder: Path) -> Iterator[tuple[RolloutClient, str]]:
    with _service(Service(GROUP, elastic=True).of(file, folder)) as both:
        yield both


@contextmanager
def _service(file: ServeFile) -> Iterator[tuple[RolloutClient, str]]:
    """A client, and the address of its cluster."""
    with service(file, None) as client:
        import ray

        yield client, ray.get_runtime_context().gcs_address
