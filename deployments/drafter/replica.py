"""The draft model as a Serve deployment: a thin shell around one DrafterServer.

Engines poll every replica for its address (`discovery.py`) and send to it directly, not through the coordinator.
Invariant: a model whose token ids mean something else than the target's is refused at the start. The death of a
replica loses no tokens: its samples continue without drafts until it, or another, is found.
"""

from pathlib import Path
from typing import Any

import ray
from ray import serve

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.drafter.server import DrafterServer
from tailrace.deployments.serve_port import keep_serve_port_on_node
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.tokenizer_check import vocabulary_refusal


@serve.deployment(name="Drafter", max_ongoing_requests=65_536, health_check_period_s=2)
class Drafter:
    """`target`: the verifying engines. Raises ValueError, one line, if the two models' tokens differ."""

    def __init__(self, config: DrafterConfig, target: EngineConfig):
        keep_serve_port_on_node()
        if (refusal := vocabulary_refusal(Path(target.model), Path(config.model))) is not None:
            raise ValueError(refusal)
        here = serve.get_replica_context()
        # Counted from the last core down: engines take the first ones.
        self._server = DrafterServer(config.engine(target), ray.util.get_node_ip_address(), -1 - here.rank.local_rank)

    async def address(self) -> Address:
        """Returns the address for engines. Raises RuntimeError if the draft model is down."""
        self.check_health()
        return self._server.address

    async def stats(self) -> dict[str, Any]:
        """Returns `DrafterServer.stats`."""
        return self._server.stats()

    def check_health(self) -> None:
        """Raises if the draft model is down. Called by Serve, which then replaces the replica."""
        if not self._server.healthy:
            raise RuntimeError("the draft model is down")

    def __del__(self):
        if hasattr(self, "_server"):  # the constructor may have failed before
            self._server.stop()
