"""Reads back the weights that the replicas compute with, and compares them with each other and with their source.

Called by the coordinator at a trainer's request; each replica answers between two of its steps.
"""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tailrace.deployments.messages.chunk import WeightsRead
from tailrace.deployments.messages.command import ReadWeights
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import Rejected, WeightsCheck

if TYPE_CHECKING:  # it loads Ray, and this function needs none of it
    from tailrace.deployments.coordinator.engine_client import EngineClient


async def weights_check(engines: "EngineClient", replicas: Iterable[str]) -> WeightsCheck | Rejected:
    """Returns the weights of these replicas; or Rejected if those of one could not be read or have changed version
    meanwhile.
    """
    replicas = sorted(replicas)
    if not replicas:
        return Rejected(reason="no replica is up: there are no weights to read")
    answers = await asyncio.gather(*(engines.ask(name, ReadWeights()) for name in replicas), return_exceptions=True)
    for name, answer in zip(replicas, answers, strict=True):
        if not isinstance(answer, WeightsRead):
            return Rejected(reason=f"{name}: its weights were not read: {str(answer) or one_line(answer)}")
    first = answers[0]
    if len({(one.version, one.digest) for one in answers}) > 1:
        return Rejected(reason="the weights were updated meanwhile; ask again")
    unlike = {name: _unlike(first, one) for name, one in zip(replicas, answers, strict=True)}
    return WeightsCheck(
        version=first.version,
        digest=first.digest,
        replicas=tuple(replicas),
        checksums=first.checksums,
        unlike={name: found for name, found in unlike.items() if found},
        problems={name: one.problem for name, one in zip(replicas, answers, strict=True) if one.problem},
    )


def _unlike(first: WeightsRead, other: WeightsRead) -> tuple[str, ...]:
    names = first.checksums.keys() | other.checksums.keys()
    found = {name for name in names if first.checksums.get(name) != other.checksums.get(name)}
    return tuple(sorted(found | set(other.unlike or ())))
