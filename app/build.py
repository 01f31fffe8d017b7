"""`build(args)`: the Serve application, Coordinator -> Engine -> Drafter. `import_path` of `serve.yaml` names it.

Invariant: none is built on a cluster whose calls need no token, unless the configuration allows it.
"""

from ray.serve import Application

from tailrace.app.calls.otlp import otlp_wanted, sampler_named
from tailrace.app.config import AppArgs, ServeFile
from tailrace.app.model import resolve_model
from tailrace.deployments.coordinator.coordinator import Coordinator
from tailrace.deployments.drafter.replica import Drafter
from tailrace.deployments.engine.replica import Engine
from tailrace.deployments.telemetry import TelemetryExport
from tailrace.deployments.token_mode import require_token_mode


def build(args: AppArgs) -> Application:
    """Returns the application with its defaults; `serve deploy` applies the file's `deployments` over them."""
    engine, drafter = Engine.options(num_replicas=2), Drafter.options(num_replicas=1)
    return _bind(args, Coordinator.options(ray_actor_options={"num_cpus": 0}), engine, drafter)


def build_from_file(file: ServeFile) -> Application:
    """Returns the application with the settings of a whole file, for `serve.run` in a driver."""
    made = [
        deployment.options(**file.application.of(name).model_dump(exclude_none=True))
        for name, deployment in (("Coordinator", Coordinator), ("Engine", Engine), ("Drafter", Drafter))
    ]
    return _bind(file.application.args, *made)


def _bind(args: AppArgs, coordinator, engine, drafter) -> Application:
    require_token_mode(args.allow_no_token)
    model = str(resolve_model(args.engine.model))
    config = args.engine.model_copy(update={"model": model})
    otlp = otlp_wanted()
    drafts, drafters = args.drafter, None
    if drafts is not None:
        drafts = drafts.model_copy(update={"model": str(resolve_model(drafts.model))})
        drafters = drafter.bind(drafts, config)
    engines = engine.bind(config, 0, otlp, args.pool, args.context, drafts, drafters)
    return coordinator.bind(
        engines,
        model,
        config.max_model_len,
        TelemetryExport(spans=otlp, metrics=otlp_wanted("METRICS"), every_group=sampler_named()),
        args.pool,
        args.context,
        token_log_dir=args.token_log_dir,
        allow_no_token=args.allow_no_token,
    )
