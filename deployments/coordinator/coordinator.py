"""The only ingress: one Serve replica, a thin shell around `Rollouts`. Drivers reach it through `app.calls.client`.

`user_config: {policies: {...}, quotas: {...}, allowed_code: [...]}` in `serve.yaml` changes them without a restart.
Invariant: each call of a driver names its role and is done only if the role has the right; policies come as data, and
name code of the deployment's list alone.
"""

import asyncio
from functools import partial
from pathlib import Path
from secrets import token_hex

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.batches.quotas import Quotas
from tailrace.deployments.batches.token_log import TokenLog
from tailrace.deployments.batches.tokenizer_files import tokenizer_files
from tailrace.deployments.channel.sockets import ListeningSocket
from tailrace.deployments.context.actors import ensure_context
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.service import ContextService
from tailrace.deployments.coordinator.engine_client import EngineClient
from tailrace.deployments.coordinator.gateway_lines import GatewayLines
from tailrace.deployments.coordinator.kv_pool_manager import KvPoolManager
from tailrace.deployments.coordinator.rollouts import Rollouts
from tailrace.deployments.coordinator.service_size import ServiceSize
from tailrace.deployments.coordinator.weights_check import weights_check
from tailrace.deployments.feed.watch_calls import WatchCalls
from tailrace.deployments.garbage import collect_garbage
from tailrace.deployments.messages.roles import Passed, Role, admits
from tailrace.deployments.messages.status import PoolView
from tailrace.deployments.metrics.export import export_of
from tailrace.deployments.serve_port import keep_serve_port_on_node
from tailrace.deployments.telemetry import Telemetry, TelemetryExport
from tailrace.deployments.token_mode import require_token_mode
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.pool import ensure_pool
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.allowed_code import allow_code
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.exactness import Exactness

RECONFIGURED = ("allowed_code", "policies", "quotas")
"""Keys of `user_config`."""


@serve.deployment(name="Coordinator", num_replicas=1, max_ongoing_requests=10_000, graceful_shutdown_wait_loop_s=0.2)
class Coordinator(WatchCalls, GatewayLines):
    """`engines`: handle of the Engine deployment. `config`: the engines' own; its model folder holds the tokenizer.

    `pool`, `context` and `token_log_dir` may be None. Raises TokenModeOff.
    """

    _block_tokens, _drafters = 1, 0
    """Sizes for the configured policies: tokens per KV block of the engines (1: chunks end anywhere), draft models."""

    _exactness: Exactness = "bits"
    """Level of the engines."""

    def __init__(
        self,
        engines: DeploymentHandle,
        config: EngineConfig,
        export: TelemetryExport,
        size: ServiceSize,
        pool: PoolConfig | None = None,
        context: ContextConfig | None = None,
        token_log_dir: str | None = None,
        allow_no_token: bool = False,
    ):
        require_token_mode(allow_no_token)
        self._block_tokens, self._drafters, self._exactness = config.block_tokens, size.drafters, config.exactness
        keep_serve_port_on_node()
        here, nonce = serve.get_replica_context(), token_hex(3)
        app_name, name = here.app_name, here.replica_id.unique_id
        self._listen = partial(ListeningSocket, ray.util.get_node_ip_address())
        self._start(
            engines=EngineClient(engines, self._listen, nonce),
            prompts=Prompts(config.model, config.max_model_len),
            telemetry=Telemetry("tailrace-coordinator", export.spans, instance=name, every_group=export.every_group),
            kv_pool_manager=None if pool is None else KvPoolManager(ensure_pool(pool, app_name)),
            context=None if context is None else ContextService(ensure_context(context, app_name), context),
            token_log=TokenLog(Path(token_log_dir) if token_log_dir else None, app_name),
            nonce=nonce,
            limits=size.limits,
        )
        metrics = export_of("coordinator", export.metrics, self._rollouts.metrics.collect)
        others = collect_garbage(lambda: not self._rollouts.batches), metrics.run()
        self._loops += map(asyncio.get_running_loop().create_task, others)

    def _start(
        self,
        engines: EngineClient,
        prompts: Prompts,
        telemetry: Telemetry,
        kv_pool_manager: KvPoolManager | None,
        context: ContextService | None,
        token_log: TokenLog,
        nonce: str,
        limits: Limits | None,
    ) -> None:
        """Starts the loops of a coordinator with these collaborators."""
        self._engines, self._limits = engines, limits
        self._kv_pool_manager, self._context, self._prompts = kv_pool_manager, context, prompts
        self._rollouts = Rollouts(
            engines=engines,
            prompts=prompts,
            policies=Policies(),
            telemetry=telemetry,
            kv_pool_manager=kv_pool_manager,
            context=context,
            token_log=token_log,
            nonce=nonce,
        )
        loops = [self._rollouts.run(), self._rollouts.look(), engines.follow()]
        if kv_pool_manager is not None:
            loops += [self._rollouts.poll_pool(), kv_pool_manager.work()]
        self._loops = list(map(asyncio.get_running_loop().create_task, loops))

    async def reconfigure(self, user_config: dict) -> None:
        """Takes new policies and quotas for the next core. Serve calls it at the start and when `user_config` changes.

        Raises ValueError for a key that it does not have.
        """
        if unknown := sorted(user_config.keys() - RECONFIGURED):
            raise ValueError(f"user_config.{unknown[0]}: unknown key; there are {', '.join(RECONFIGURED)}")
        allow_code(*user_config.get("allowed_code", ()))
        self._rollouts.deliveries.quotas = Quotas(**user_config.get("quotas", {}))
        self._rollouts.core_holder.set_limits(self._limits)
        self._rollouts.core_holder.set_exactness(self._exactness)
        self._rollouts.core_holder.set_sizes(self._block_tokens, self._drafters)
        self._rollouts.core_holder.set_policies(Policies(**user_config.get("policies", {})))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the wanted replicas. Serve calls it, and passes the answer to `deployments.autoscaler`."""
        return self._rollouts.replica_target.metrics()

    # ---- calls of drivers: the role that they need, and what does them ---------------------------------

    rollout = Passed(Role.EVALUATOR, lambda me: me._rollouts.deliveries.read, is_stream=True)
    renew = Passed(Role.EVALUATOR, lambda me: me._rollouts.deliveries.renew)
    cancel = Passed(Role.TRAINER, lambda me: me._rollouts.deliveries.cancel)
    cancel_all = Passed(Role.TRAINER, lambda me: me._rollouts.cancel_all)
    generate = Passed(Role.EVALUATOR, lambda me: me._rollouts.sessions.generate)
    stream_sample = Passed(Role.EVALUATOR, lambda me: me._rollouts.sessions.stream, is_stream=True)
    cancel_samples = Passed(Role.EVALUATOR, lambda me: me._rollouts.sessions.cancel)
    renew_session = Passed(Role.EVALUATOR, lambda me: me._rollouts.sessions.renew)
    close_session = Passed(Role.EVALUATOR, lambda me: me._rollouts.sessions.close)
    open_trajectory = Passed(Role.EVALUATOR, lambda me: me._rollouts.trajectories.open)
    read_trajectory = Passed(Role.EVALUATOR, lambda me: me._rollouts.trajectories.read)
    add_turn = Passed(Role.EVALUATOR, lambda me: me._rollouts.trajectories.add)
    end_trajectory = Passed(Role.EVALUATOR, lambda me: me._rollouts.trajectories.end)
    update_weights = Passed(Role.TRAINER, lambda me: me._rollouts.update_weights)
    read_weights = Passed(Role.TRAINER, lambda me: partial(weights_check, me._engines, me._rollouts.registry.reports))
    transfer_weights = Passed(Role.TRAINER, lambda me: me._rollouts.weight_transfer.run)
    publish_weights = Passed(Role.TRAINER, lambda me: me._rollouts.publications.run)
    load_adapter = Passed(Role.TRAINER, lambda me: me._rollouts.adapters.load)
    unload_adapter = Passed(Role.TRAINER, lambda me: me._rollouts.adapters.unload)
    pause = Passed(Role.TRAINER, lambda me: me._rollouts.admission.pause)
    resume = Passed(Role.TRAINER, lambda me: me._rollouts.sleep.resume)
    sleep = Passed(Role.TRAINER, lambda me: me._rollouts.sleep.begin)
    wake_up = Passed(Role.TRAINER, lambda me: me._rollouts.sleep.end)
    replica_changes = Passed(Role.OBSERVER, lambda me: me._rollouts.replica_target.changes, is_stream=True)
    set_policies = Passed(Role.TRAINER, lambda me: me._rollouts.core_holder.take_policies)
    journal = Passed(Role.TRAINER, lambda me: me._rollouts.core_holder.journal)
    renew_journal = Passed(Role.TRAINER, lambda me: me._rollouts.core_holder.renew_journal)
    reserve = Passed(Role.TRAINER, lambda me: me._rollouts.reserve)
    reset_caches = Passed(Role.TRAINER, lambda me: me._engines.reset_caches)
    take_spans = Passed(Role.EVALUATOR, lambda me: me._rollouts.take_spans)

    @admits(Role.EVALUATOR)
    async def model_folder(self) -> str:
        return self._prompts.model

    @admits(Role.EVALUATOR)
    async def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the content of the tokenizer's files by name; some megabytes."""
        return await asyncio.to_thread(tokenizer_files, Path(self._prompts.model))

    @admits(Role.TRAINER)
    async def record_rewards(self, prompt_key: str, epoch: int, rewards: dict[int, float]) -> None:
        if self._context is not None:
            self._context.reward(prompt_key, epoch, rewards)

    @admits(Role.TRAINER)
    async def forget_history(self) -> int:
        return 0 if self._context is None else await self._context.forget_history()

    @admits(Role.TRAINER)
    async def inspect_group(self, name: str) -> dict | None:
        return None if self._context is None else await self._context.inspect(name)

    @admits(Role.TRAINER)
    async def pool_detail(self) -> PoolView | None:
        return None if self._kv_pool_manager is None else await self._kv_pool_manager.detail()

    @admits(Role.TRAINER)
    async def drain_pool(self) -> int | None:
        return None if self._kv_pool_manager is None else await self._kv_pool_manager.drain()

    def ended_loops(self) -> list[asyncio.Task]:
        """Returns the loops that have ended, each by an exception. A healthy coordinator has none."""
        return [loop for loop in self._loops if loop.done()]

    async def check_health(self) -> None:
        """Raises RuntimeError if a loop has ended. Serve then replaces the coordinator."""
        for loop in self.ended_loops():
            raise RuntimeError("the coordinator's loop has stopped") from loop.exception()
