"""Serve's options of each deployment, as they follow from `args`. Used by `app.build`, and by `app.cluster` for sizes.

Invariant: the number of replicas has one place, `args.replicas` or `args.drafter.replicas`; all that Serve needs for
replicas that come and go is made from it here.
"""

from typing import Any

from tailrace.app.config import AppArgs, Application
from tailrace.deployments.replica_count import Replicas
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

GPU_REPLICA_CPUS = 4
"""CPU cores that Ray reserves for a replica on GPUs: for its loop, its stepping thread, its drafts and the pool."""

STOP_S = {"cpu": 20.0, "gpu": 120.0}
"""Seconds that an engine may take to end before Serve kills it. On a CPU Serve's default; no GPU has been measured."""

DRAFTER_STOP_S = 5.0
"""Seconds that a draft model may take to end: it has nothing to finish."""

CHECK_S = {"cpu": 30.0, "gpu": 60.0}
"""Seconds without an answer to a health check after which Serve replaces a replica. On a CPU Serve's default; no GPU
has been measured. A step that does not end is found by the engine itself (docs/survival.md).
"""

CHECK_PERIOD_S = 2.0
"""Seconds between two health checks: a lost replica's samples wait for no longer than that; Serve's default is 10 s."""

REPORTS = {"metrics_interval_s": 0.3, "look_back_period_s": 1.0}
"""Serve's timing of the coordinator's report. With Serve's defaults it would react in half a minute."""

UNREAD = {"metrics_interval_s": 1.0, "look_back_period_s": 5.0}
"""Serve's timing of reports that nobody reads, those of engines and draft models: they cost processor time
(docs/measurements/processes.md).
"""


def options_of(args: AppArgs) -> dict[str, dict[str, Any]]:
    """Returns the options of each deployment by its name. Without a draft model there is no Drafter."""
    device = args.engine.device
    checks = {"health_check_period_s": CHECK_PERIOD_S, "health_check_timeout_s": CHECK_S[device]}
    options = {
        "Coordinator": {"ray_actor_options": {"num_cpus": 0}},
        "Engine": {
            **_number(args.replicas, args.replicas.max),
            "ray_actor_options": _resources(args.engine),
            "graceful_shutdown_timeout_s": STOP_S[device],
            **checks,
        },
    }
    if args.replicas.come_and_go:
        options["Coordinator"]["autoscaling_config"] = _scaling(1, 1, 1, REPORTS)
    if args.drafter is not None:
        options["Drafter"] = {
            **_number(args.drafter.replicas, args.drafter.replicas.min),
            "ray_actor_options": _resources(args.drafter.engine(args.engine)),
            "graceful_shutdown_timeout_s": DRAFTER_STOP_S,
            **checks,
        }
    return options


def all_options(application: Application) -> dict[str, dict[str, Any]]:
    """Returns the options of each deployment by its name, with those of a file over those that follow from `args`."""
    options = options_of(application.args)
    for settings in (one for one in application.deployments if one.name in options):
        given = settings.model_dump(mode="json", exclude={"name"})
        options[settings.name] |= {key: value for key, value in given.items() if value is not None}
    return options


def _number(replicas: Replicas, initial: int) -> dict[str, Any]:
    if replicas.come_and_go:
        return {"autoscaling_config": _scaling(replicas.min, replicas.max, initial, UNREAD)}
    return {"num_replicas": replicas.max}


def _scaling(least: int, most: int, initial: int, timing: dict[str, float]) -> dict[str, Any]:
    return {
        "min_replicas": least,
        "max_replicas": most,
        "initial_replicas": initial,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "policy": {"policy_function": "tailrace.deployments.autoscaler:ByCoordinator"},
        **timing,
    }


def _resources(engine: EngineConfig) -> dict[str, float]:
    """Returns Ray's resources of one replica."""
    if engine.device == "gpu":
        return {"num_cpus": GPU_REPLICA_CPUS, "num_gpus": engine.tensor_parallel}
    return {"num_cpus": (engine.cores or 1) * engine.tensor_parallel}
