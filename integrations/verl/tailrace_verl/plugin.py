"""Entry point of the group `verl.plugins`: fills verl's registries while `import verl` runs, in every process.

Invariant: after it, `rollout.name=tailrace`, `checkpoint_engine.backend=tailrace` and the two agent loops are known.
verl keeps an error of a plug-in to itself, so this one is logged first.
"""

import logging


def _register() -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from tailrace_verl import agent_loop, checkpoint_engine  # noqa: F401 - each registers itself

    _ROLLOUT_REGISTRY["tailrace", "async"] = "tailrace_verl.weights.TailraceWeights"
    RolloutReplicaRegistry.register("tailrace", _replica)


def _replica() -> type:
    from tailrace_verl.replica import TailraceReplica

    return TailraceReplica


try:
    _register()
except Exception as error:
    logging.getLogger(__name__).warning("tailrace_verl is not registered: %s: %s", type(error).__name__, error)
    raise
