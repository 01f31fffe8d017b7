"""verl's view of the service: one replica, whose server is an actor and whose worker commits weights.

Invariant: no GPU is asked for. How many engines there are is the service's affair, not verl's. Made by verl's
`LLMServerManager` for `rollout.name=tailrace`.
"""

import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from tailrace_verl.requests import Lengths
from tailrace_verl.server import TailraceServer
from tailrace_verl.settings import SERVER, settings
from tailrace_verl.unsaved_tensors import unsaved_tensors

ONE = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


class TailraceReplica(RolloutReplica):
    """Raises ValueError for sizes of engines that belong into the service's own file."""

    server_class: type = TailraceServer

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for name in ONE:
            if getattr(self.config, name) != 1:
                raise ValueError(f"rollout.{name}: give 1; engines are sized in the service's serve.yaml")
        self._settings = settings(self.config.engine_kwargs)

    async def init_standalone(self) -> None:
        """One worker on a CPU, in place of a placement group of GPUs."""
        self.rollout_mode = RolloutMode.STANDALONE
        self.resource_pool = RayResourcePool(process_on_nodes=[1], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"tailrace_weights_{self.replica_rank}{self.name_suffix}",
            use_gpu=False,
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """One server for all replicas of a run: requests of a group must meet. Fails if no service answers, or if verl
        replays routes and an engine keeps none.
        """
        server = ray.remote(self.server_class).options(
            name=SERVER,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=max(self.max_concurrency, self._settings.max_concurrency),
        )
        lengths = Lengths(self.config.prompt_length, self.config.response_length)
        unsaved, replays = unsaved_tensors(self.model_config.path), self.config.enable_rollout_routing_replay
        handle = server.remote(self._settings, lengths, self.config.seed, unsaved, replays)
        await handle.check.remote()
        self.servers, self._server_handle = [handle], handle
        self._server_address = f"tailrace:{self.replica_rank}"  # a name for verl's router; nothing listens there

    def rollout_worker_use_gpu(self) -> bool:
        return False
