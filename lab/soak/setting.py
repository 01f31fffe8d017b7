"""The service of a soak: two drafted engines and a draft model, and the weights that take turns.

Called by lab/soak/run.py.
"""

from collections.abc import Sequence
from pathlib import Path

from tailrace.app.config import ServeFile, with_engine
from tailrace.app.deployment_settings import UserConfig
from tailrace.app.model import perturbed, resolve_model
from tailrace.deployments.replica_count import fixed
from tailrace.lab.verification.runs import GROUP, WHOLE, chunked
from tailrace.lab.verification.services import drafter_like
from tailrace.policies.families.registry import Policies

KV_GIB = 0.5
"""Maximum KV in GiB for each model: three of them share one machine."""

DISTURBED = Policies(**chunked(32, {"type": "fixed", "tokens": 6}, "round_robin"))
"""Policies under faults: every sample moves at every chunk, through the pool, and is drafted for."""

UNDISTURBED = Policies(**WHOLE, drafting="off")
"""Policies of the references: whole samples, each on one replica, without drafts."""

OTHER_WEIGHTS = 2


def file_of(file: ServeFile, folder: Path) -> ServeFile:
    """Returns the configuration of the service. `folder`: for the draft model's weights."""
    engine = file.application.args.engine
    file = with_engine(file, {**dict(GROUP), "exactness": "bits", "kv_cache_gib": min(engine.kv_cache_gib, KV_GIB)})
    application = file.application
    drafter = application.args.drafter or drafter_like(application.args.engine, folder)
    changed = application.with_args(
        replicas=fixed(application.args.replicas.max), drafter=drafter.model_copy(update={"replicas": fixed(1)})
    )
    return file.model_copy(update={"applications": (changed.with_user_config(UserConfig(policies=DISTURBED)),)})


def weights_of(file: ServeFile, folder: Path) -> Sequence[str]:
    """Returns the configured weights first, then others made from them in `folder`."""
    model = resolve_model(file.application.args.engine.model)
    others = [perturbed(model, folder / f"weights-{seed}", seed) for seed in range(1, OTHER_WEIGHTS + 1)]
    return [str(model), *map(str, others)]
