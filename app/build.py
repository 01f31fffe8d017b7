"""`build(args)`: the Serve application, Coordinator -> Engine. What `import_path` of `serve.yaml` names."""

from ray.serve import Application

from app.config import AppArgs, ServeFile, otlp_wanted
from app.model import resolve_model
from deployments.coordinator import Coordinator
from deployments.engine.replica import Engine


def build(args: AppArgs) -> Application:
    """The application with its defaults; `serve deploy` lays the file's `deployments` over them."""
    return _bind(args, Coordinator.options(ray_actor_options={"num_cpus": 0}), Engine.options(num_replicas=2))


def build_from_file(file: ServeFile) -> Application:
    """The application with the settings of a whole file, for `serve.run` in a driver."""
    options = {
        settings.name: settings.model_dump(exclude_none=True)
        for settings in (file.application.of("Coordinator"), file.application.of("Engine"))
    }
    return _bind(
        file.application.args, Coordinator.options(**options["Coordinator"]), Engine.options(**options["Engine"])
    )


def _bind(args: AppArgs, coordinator, engine) -> Application:
    model = str(resolve_model(args.engine.model))
    config = args.engine.model_copy(update={"model": model})
    otlp = otlp_wanted()
    engines = engine.bind(config, 0, otlp, args.pool, args.context)
    return coordinator.bind(engines, model, config.max_model_len, otlp, args.pool, args.context)
