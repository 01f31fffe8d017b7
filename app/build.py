"""`build(args)`: the Serve application, Coordinator -> Engine -> Drafter. `import_path` of `serve.yaml` names it.

Invariant: none is built on a cluster whose calls need no token, unless the configuration allows it.
"""

import os
from typing import Any

from ray.serve import Application

from tailrace.app.calls.otlp import otlp_wanted, sampler_named
from tailrace.app.config import AppArgs, FileArgs, ServeFile
from tailrace.app.deployment_options import all_options, options_of
from tailrace.app.model import resolve_model
from tailrace.deployments.coordinator.coordinator import Coordinator
from tailrace.deployments.coordinator.service_size import ServiceSize
from tailrace.deployments.drafter.replica import Drafter
from tailrace.deployments.engine.replica import Engine
from tailrace.deployments.telemetry import TelemetryExport
from tailrace.deployments.token_mode import require_token_mode
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.policies.core.scaling import Limits


def build(args: FileArgs) -> Application:
    """Returns the application of a file; `serve deploy` applies the file's `deployments` over it."""
    return _bind(args, options_of(args))


def build_from_code(args: AppArgs) -> Application:
    """Returns the application of a configuration made in code, which may set constants; `app.cluster` names it."""
    return _bind(args, options_of(args))


def build_from_file(file: ServeFile) -> Application:
    """Returns the application with the settings of a whole file, for `serve.run` in a driver."""
    return _bind(file.application.args, all_options(file.application))


def _bind(args: AppArgs, options: dict[str, dict[str, Any]]) -> Application:
    require_token_mode(args.allow_no_token)
    config = args.engine.model_copy(update={"model": str(resolve_model(args.engine.model))})
    pool, otlp = _keyed(args.pool), otlp_wanted()
    context = args.context and args.context.for_replicas(args.replicas.max)
    drafts, drafters = args.drafter, None
    if drafts is not None:
        drafts = drafts.model_copy(update={"model": str(resolve_model(drafts.model))})
        drafters = Drafter.options(**options["Drafter"]).bind(drafts, config)
    return Coordinator.options(**options["Coordinator"]).bind(
        Engine.options(**options["Engine"]).bind(config, 0, otlp, pool, context, drafts, drafters),
        config,
        TelemetryExport(spans=otlp, metrics=otlp_wanted("METRICS"), every_group=sampler_named()),
        ServiceSize(
            limits=Limits(args.replicas.min, args.replicas.max) if args.replicas.come_and_go else None,
            drafters=args.drafters,
        ),
        pool,
        context,
        token_log_dir=args.token_log_dir,
        allow_no_token=args.allow_no_token,
    )


def _keyed(pool: PoolConfig | None) -> PoolConfig | None:
    """Returns the pool's settings with the token's file that RAY_AUTH_TOKEN_PATH names, unless code has set another."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if pool is None or not path or pool.mac_key_file != PoolConfig().mac_key_file:
        return pool
    return pool.model_copy(update={"mac_key_file": path})
