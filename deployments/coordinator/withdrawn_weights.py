"""Ends what waits for an update that is withdrawn, see `Weights`: it must not run under the weights before.

Invariant: once it has run, what is in flight waits for no version above the service's. Called by `Rollouts` before the
core is given a replica.
"""

from collections.abc import Callable
from functools import partial

from tailrace.deployments.batches.deliveries import Delivery
from tailrace.deployments.batches.live_batches import LiveBatches
from tailrace.deployments.batches.open_sessions import OpenSessions
from tailrace.deployments.coordinator.weights import Weights


def refuse_waiting(
    weights: Weights, batches: LiveBatches, sessions: OpenSessions, cancel: Callable[[Delivery], object]
) -> None:
    """Gives the drivers of batches and samples that wait for withdrawn weights the reason, and cancels their samples.

    `cancel`: cancels a batch's samples in the core. Does nothing if no weights were withdrawn since the last call.
    """
    if not weights.was_withdrawn:
        return
    weights.was_withdrawn = False
    refusal = partial(weights.refusal, begun=True)
    for batch in batches.all():
        if batch.delivery is not None and (refused := refusal(batch.message)) is not None:
            batch.delivery.refuse(refused)
            cancel(batch.delivery)
    sessions.refuse(refusal)
