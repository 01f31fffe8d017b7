"""The trajectories that this gateway serves: their keys and their trees.

Invariant: the coordinator has each turn before the end of its answer reaches the client, so any gateway can go on. A
coordinator that was lost gets a trajectory again from the gateway that knows it.
"""

import hmac
import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256

from tailrace.app.calls.trajectory_calls import TrajectoryCalls
from tailrace.app.gateway.edge.errors import UnknownTrajectory
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.trajectories.requests import OpenRequest
from tailrace.app.gateway.trajectories.tree import TrajectoryTree
from tailrace.app.gateway.trajectories.turn import TurnInProgress
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.trajectory import TrajectoryOpening, TrajectoryTurn

ID = re.compile("[0-9a-f]{32}")


class KnownTrajectory:
    """A trajectory's tree here, and when it ends by this machine's monotonic clock."""

    def __init__(self, tree: TrajectoryTree, left_s: float):
        self.tree, self.ends_s = tree, time.monotonic() + left_s


class GatewayTrajectories:
    """`calls_of`: returns the coordinator's calls for a role."""

    def __init__(self, calls_of: Callable[[Role], TrajectoryCalls]):
        self._calls_of = calls_of
        self._known: dict[str, KnownTrajectory] = {}

    async def open(self, role: Role, request: OpenRequest) -> tuple[str, str]:
        """Opens a trajectory. Returns its id and its key."""
        name, key = secrets.token_hex(16), f"tj-{secrets.token_urlsafe(32)}"
        group = request.group or f"trajectory-{name}"
        naming = Naming(request.seed, request.step, group, request.index, weights_version=request.weights_version)
        opening = TrajectoryOpening(
            trajectory_id=name, key_digest=sha256(key.encode()).hexdigest(), settings=naming.session(), group=group,
            index=request.index, model=request.model, limits=request.limits, sampling=request.sampling,
        )  # fmt: skip
        await self._calls_of(role).open(opening, request.limits.seconds)
        for other in [other for other, one in self._known.items() if one.ends_s < time.monotonic()]:
            del self._known[other]
        return name, key

    async def is_key(self, name: str, given: bytes) -> bool:
        """Returns whether a trajectory has this key; False if there is no such trajectory."""
        if not ID.fullmatch(name):
            return False
        try:
            known = self._known.get(name) or await self._read(Role.EVALUATOR, name)
        except UnknownTrajectory:
            return False
        return hmac.compare_digest(known.tree.opening.key_digest, sha256(given).hexdigest())

    async def turn(self, role: Role, name: str) -> TurnInProgress:
        """Returns the next turn of a trajectory. Raises UnknownTrajectory."""
        tree = await self.tree(role, name)
        return TurnInProgress(tree, partial(self._add, role, tree))

    async def tree(self, role: Role, name: str) -> TrajectoryTree:
        """Returns a trajectory's tree with all turns so far. Raises UnknownTrajectory."""
        return (await self._read(role, name)).tree

    async def _add(self, role: Role, tree: TrajectoryTree, turn: TrajectoryTurn) -> None:
        """Records a turn of a tree. Raises UnknownTrajectory if the trajectory has ended."""
        calls, name = self._calls_of(role), tree.opening.trajectory_id
        while (place := await calls.add(name, tree.epoch, turn)) is None:  # it has ended, or the coordinator was lost
            known = (await self._read(role, name)).tree
            tree, turn = known, known.moved(turn, tree)
        if place == len(tree.turns):
            tree.add([turn])

    async def end(self, role: Role, name: str, reward: float | None) -> TrajectoryTree:
        """Ends a trajectory. Returns its tree. Raises UnknownTrajectory if it has ended before."""
        calls, tree = self._calls_of(role), await self.tree(role, name)
        while (state := await calls.end(name, reward)).opening is None and state.epoch != tree.epoch:
            tree = await self.tree(role, name)  # the coordinator was lost: gives the new one the trajectory
        self._known.pop(name, None)
        if state.opening is None:
            raise UnknownTrajectory(f"trajectory {name}: it has ended")
        if state.epoch == tree.epoch:
            tree.add(state.turns[len(tree.turns) :])  # those that another gateway has recorded since
        return tree

    async def _read(self, role: Role, name: str) -> KnownTrajectory:
        """Brings what is known here up to the coordinator's state."""
        calls, known = self._calls_of(role), self._known.get(name)
        epoch, count = (known.tree.epoch, len(known.tree.turns)) if known is not None else ("", 0)
        state = await calls.read(name, epoch, count)
        if state.opening is None and known is not None and state.epoch != epoch:  # another coordinator
            await calls.open(known.tree.opening, max(0.0, known.ends_s - time.monotonic()), tuple(known.tree.turns))
            state = await calls.read(name)
        if state.opening is None:
            self._known.pop(name, None)
            raise UnknownTrajectory(f"trajectory {name}: there is none, or it has ended")
        if known is not None and state.epoch != epoch:
            count = 0
        known = self._known.get(name)  # another call may have changed it
        if known is None or known.tree.epoch != state.epoch:
            if count:
                return await self._read(role, name)
            tree = TrajectoryTree(state.opening, state.epoch)
            tree.begun = tree.begun if known is None else known.tree.begun  # their requests are open, as before
            known = self._known[name] = KnownTrajectory(tree, state.left_s)
        known.tree.add(state.turns[len(known.tree.turns) - count :])
        return known
