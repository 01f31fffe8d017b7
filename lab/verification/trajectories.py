"""Trajectories over HTTP, played twice under the same names: left alone, and while parts of the service are killed.

Each sample of the batch is the first turn of a trajectory; a second turn continues it, and a third one branches from
its first answer. A replica is killed in the midst of first turns, the gateway before the second ones, and the
coordinator in the midst of the branches. The rows of both plays must be equal. Called by lab/verification/tokens.py.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.session import groups_of_answers
from tailrace.app.cluster import DEPLOY_S
from tailrace.app.errors import Failed
from tailrace.app.http import bodies
from tailrace.app.http.connections import Connections
from tailrace.app.http.gateway_connection import GatewayConnection
from tailrace.app.http.trajectory import CapturedTrajectory, TrajectoryRow
from tailrace.deployments.messages.rollout import BatchSettings, GroupResult, PromptGroup, RolloutBatch
from tailrace.deployments.messages.session import SampleAnswer
from tailrace.lab.verification.disturbances import kill_actors

TOOLS = tuple(range(1_000, 1_016)), tuple(range(2_000, 2_016))
"""Token ids of the tools' results, before the second turn and before the branch."""

TURN_TOKENS = 64
MAX_OPEN = 512

Kill = Callable[[RolloutClient], Awaitable[str]]


class PlayedTrajectory(NamedTuple):
    first: SampleAnswer
    rows: tuple[TrajectoryRow, ...]

    def tokens(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(row.token_ids, row.mask) for row in self.rows]


async def trajectories(client: RolloutClient, url: str, batch: RolloutBatch) -> tuple[list[GroupResult], str]:
    """Returns the groups of first turns, and a note of what was killed, empty if a kill found nothing. Raises Failed if
    the plays differ, or if a trajectory has no rows.
    """
    connection = GatewayConnection(url, Connections(url, None, MAX_OPEN), DEPLOY_S)
    places = [(group, index) for group in batch.groups for index in range(group.samples)]
    try:
        alone, _ = await _played(connection, batch, places, client, ())
        await client.reset_caches()
        killed, notes = await _played(connection, batch, places, client, KILLS)
    finally:
        connection.close()
    for (group, index), one, other in zip(places, alone, killed, strict=True):
        if not one.rows or one.tokens() != other.tokens():
            fault = "other rows after the kills" if one.rows else "no rows"
            raise Failed(f"trajectories: {group.prompt_id!r} index {index} has {fault}")
    rows = sum(len(one.rows) for one in killed)
    note = ", ".join([f"{rows} rows", *notes]) if all(notes) else ""
    return list(groups_of_answers([one.first for one in killed]).values()), note


async def _played(
    connection: GatewayConnection, batch: RolloutBatch, places: Sequence[tuple[PromptGroup, int]],
    client: RolloutClient, kills: Sequence[Kill],
) -> tuple[list[PlayedTrajectory], list[str]]:  # fmt: skip
    """Plays all trajectories at once, turn by turn. `kills`: one for each turn, or none."""
    names = [{"group": group.prompt_id, "index": index, "seed": batch.seed, "step": batch.step}
             for group, index in places]  # fmt: skip
    opened = [CapturedTrajectory(connection, await connection.ask("POST", "/v1/trajectories", one)) for one in names]
    settings, notes, answers = BatchSettings(batch_id=batch.batch_id, seed=batch.seed, step=batch.step), [], []
    for turn in range(1 + len(TOOLS)):
        kill = asyncio.ensure_future(kills[turn](client)) if kills else None
        if kill is not None and kills[turn] is kill_the_gateway:
            await kill  # an answer that was recorded and lost would be asked for again: another sample
        asked = []
        for place, ((group, _), trajectory) in enumerate(zip(places, opened, strict=True)):
            path, body = bodies.request_of(group, 1)
            if turn:
                before = answers[place]
                prompt = (*before.prompt_token_ids, *before.sample.token_ids, *TOOLS[turn - 1])
                more = {"prompt": prompt, "max_tokens": TURN_TOKENS, "logprobs": 1, "return_tokens_as_token_ids": True}
                path, body = "/v1/completions", {key: body[key] for key in body.keys() - {"messages"}} | more
            asked.append(_turn(connection, trajectory, path, body, settings, group.prompt_id))
        found = await asyncio.gather(*asked)
        answers = answers or found
        if kill is not None:  # one that found nobody busy until now would wait for ever
            notes.append(kill.result() if kill.done() else "")
            kill.cancel()
    rows = [(await one.rows()).rows for one in opened]
    for one in opened:
        await one.close()
    return [PlayedTrajectory(*both) for both in zip(answers, rows, strict=True)], notes


async def _turn(
    connection: GatewayConnection, trajectory: CapturedTrajectory, path: str, body: dict, settings: BatchSettings,
    group: str,
) -> SampleAnswer:  # fmt: skip
    """Asks for a turn, again as long as the service is unreachable, as clients of OpenAI do."""
    key = {"authorization": f"Bearer {trajectory.api_key}".encode()}
    path = f"/v1/trajectories/{trajectory.id}{path}"
    (answer,) = bodies.answers_of(await connection.repeated(connection.once, "POST", path, body, key), settings, group)
    return answer


async def kill_a_busy_replica(client: RolloutClient) -> str:
    victim = max((await _busy(client)).replicas, key=lambda replica: replica.running)
    return f"killed a replica with {victim.running} chunks" if kill_actors(victim.replica_id) else ""


async def kill_the_gateway(client: RolloutClient) -> str:
    killed = kill_actors("#Gateway#")
    return f"{killed} gateway" if killed else ""


async def kill_the_busy_coordinator(client: RolloutClient) -> str:
    running, killed = (await _busy(client)).running, kill_actors("#Coordinator#")
    return f"{killed} coordinator with {running} samples" if killed else ""


async def _busy(client: RolloutClient):
    while not (status := await client.status()).running:
        await asyncio.sleep(0.05)
    return status


KILLS = kill_a_busy_replica, kill_the_gateway, kill_the_busy_coordinator
"""By turn."""
