"""Services for the runs: the configured service with other engine settings, with replicas that may go, with a gateway
for HTTP, or with a draft model. Runs of one kind share a service: starting one takes longer than a run. Called by
tokens.py.
"""

from dataclasses import dataclass
from pathlib import Path

from tailrace.app.config import Application, ServeFile
from tailrace.app.deployment_settings import UserConfig
from tailrace.app.gateway.gateway_config import LOOPBACK, GatewayApplication, GatewayConfig
from tailrace.app.model import perturbed, resolve_model
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.replica_count import Replicas, fixed
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
        """Returns the configuration of this service, without its engine settings and without policies: each run brings
        its own. `folder`: for a draft model's weights, if none is configured.
        """
        application = file.application.with_user_config(UserConfig())
        if self.drafter:
            application = _beside(application, folder)
        else:
            most = application.args.replicas.max
            replicas = Replicas(min=1, max=most) if self.elastic else fixed(most)
            application = application.with_args(replicas=replicas, drafter=None)
        http = (own_gateway(file),) if self.gateway else ()
        return file.model_copy(update={"applications": (application, *http)})


def own_gateway(file: ServeFile, tokens_file: str | None = None) -> GatewayApplication:
    """Returns the configured gateway, or one with the defaults, on a free port that is open to this machine alone.
    `tokens_file`: see GatewayConfig.
    """
    gateway = file.gateway or GatewayApplication(args=GatewayConfig(app_name=file.application.name))
    own = {"tokens_file": tokens_file, "host": LOOPBACK[0], "port": free_port(LOOPBACK[0])}
    return gateway.model_copy(update={"args": gateway.args.model_copy(update=own)})


def _beside(application: Application, folder: Path) -> Application:
    """Returns the application with a draft model in the place of one replica."""
    args = application.args
    drafter = args.drafter or drafter_like(args.engine, folder)
    return application.with_args(
        replicas=fixed(max(1, args.replicas.max - 1)), drafter=drafter.model_copy(update={"replicas": fixed(1)})
    )


def drafter_like(target: EngineConfig, folder: Path) -> DrafterConfig:
    """Returns a drafter with weights that differ so little from the target's that the demo model's drafts are right 19
    times in 20; made in `folder`. As slow as its target, it runs ahead only while it is right.
    """
    model = perturbed(resolve_model(target.model), folder / "drafter", scale=0.005)
    kept = target.model_dump(include={"kv_cache_gib", "cores", "tensor_parallel", "vllm_args"})
    return DrafterConfig(model=str(model), **kept)
