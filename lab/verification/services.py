"""Services for the runs: the configured service with other engine settings, with replicas that may go, with a gateway
for HTTP, or with a draft model. Runs of one kind share a service: starting one takes longer than a run. Called by
tokens.py.
"""

from dataclasses import dataclass
from pathlib import Path

from tailrace.app.config import ELASTIC_CONFIG, Application, ServeFile, load_config
from tailrace.app.deployment_settings import CoordinatorSettings, DrafterSettings, ReplicaLimits, UserConfig
from tailrace.app.gateway.config import GatewayApplication, GatewayConfig, HttpOptions
from tailrace.app.model import perturbed, resolve_model
from tailrace.deployments.drafter.config import DrafterConfig
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.programs import free_port
from tailrace.lab.verification.adapters import RANK

Engine = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Service:
    """`engine`: settings that differ. `elastic`: replicas may be given back. `drafter`: a draft model has the place of
    one replica. `gateway`: it has HTTP, on a free port of loopback. `restarted`: its cluster is a separate process, and
    is restarted under the run. `adapters`: its engines take some.
    """

    engine: Engine = ()
    elastic: bool = False
    drafter: bool = False
    gateway: bool = False
    restarted: bool = False
    adapters: bool = False

    def engine_of(self, file: ServeFile) -> dict:
        """Returns the settings of its engines that differ from the configured ones."""
        args = file.application.args.engine.vllm_args | {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
        return dict(self.engine) | ({"vllm_args": args} if self.adapters else {})

    def of(self, file: ServeFile, folder: Path) -> ServeFile:
        """Returns the configuration of this service, without its engine settings. `folder`: for a draft model's
        weights, if none is configured.
        """
        application = file.application
        if self.drafter:
            changes = _beside(application.args.drafter or drafter_like(application.args.engine, folder), application)
        else:
            changes = (_elastic if self.elastic else _fixed)(application)
        doors = _with_gateway(file) if self.gateway else {"applications": (), "proxy_location": "Disabled"}
        applications = (application.model_copy(update=changes), *doors["applications"])
        return file.model_copy(update=doors | {"applications": applications})


def _with_gateway(file: ServeFile) -> dict:
    """Returns the configured gateway, or one with the defaults, open to this machine alone."""
    gateway = file.gateway or GatewayApplication(args=GatewayConfig(app_name=file.application.name))
    gateway = gateway.model_copy(update={"args": gateway.args.model_copy(update={"tokens_file": None})})
    http = HttpOptions(port=free_port(HttpOptions().host))
    return {"applications": (gateway,), "proxy_location": "HeadOnly", "http_options": http}


def _fixed(application: Application) -> dict:
    """Returns the application with all replicas at all times, and no draft model."""
    args, engine = application.args.model_copy(update={"drafter": None}), application.of("Engine")
    engine = engine.model_copy(update={"autoscaling_config": None, "num_replicas": engine.most_replicas})
    return {"args": args, "deployments": (_coordinator(application), engine), "autoscaling_policy": None}


def _elastic(application: Application) -> dict:
    """Returns the application as in serve.elastic.yaml, with as many replicas as are configured, of which all but one
    may go.
    """
    example, most = load_config(ELASTIC_CONFIG).application, application.of("Engine").most_replicas
    changes = {"min_replicas": 1, "max_replicas": most, "initial_replicas": most}
    scaling = example.of("Engine").autoscaling_config.model_copy(update=changes)
    engine = application.of("Engine").model_copy(update={"autoscaling_config": scaling, "num_replicas": None})
    coordinator = _coordinator(application).model_copy(
        update={
            "autoscaling_config": example.of("Coordinator").autoscaling_config,
            "user_config": UserConfig(replicas=ReplicaLimits(min=1, max=most)),
        }
    )
    policy = {"autoscaling_policy": example.autoscaling_policy}
    return _fixed(application) | {"deployments": (coordinator, engine)} | policy


def _beside(drafter: DrafterConfig, application: Application) -> dict:
    engine = application.of("Engine")
    like = next((one for one in application.deployments if one.name == "Drafter"), engine)
    settings = DrafterSettings(name="Drafter", num_replicas=1, ray_actor_options=like.ray_actor_options)
    fewer = {"autoscaling_config": None, "num_replicas": max(1, engine.most_replicas - 1)}
    deployments = (_coordinator(application), engine.model_copy(update=fewer), settings)
    args = application.args.model_copy(update={"drafter": drafter})
    return {"args": args, "deployments": deployments, "autoscaling_policy": None}


def drafter_like(target: EngineConfig, folder: Path) -> DrafterConfig:
    """Returns a drafter with weights that differ so little from the target's that the demo model's drafts are right 19
    times in 20; made in `folder`. As slow as its target, it runs ahead only while it is right.
    """
    model = perturbed(resolve_model(target.model), folder / "drafter", scale=0.005)
    kept = target.model_dump(include={"kv_cache_gib", "cores", "tensor_parallel", "vllm_args"})
    return DrafterConfig(model=str(model), **kept)


def _coordinator(application: Application) -> CoordinatorSettings:
    """Returns the coordinator's settings without policies: each run brings its own."""
    settings = application.of("Coordinator")
    return settings.model_copy(update={"autoscaling_config": None, "user_config": UserConfig()})
