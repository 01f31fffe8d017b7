"""A trajectory of an agent, by the gateway's routes: what a harness needs, and the training rows of its turns."""

from contextlib import suppress

from pydantic import BaseModel, ConfigDict

from tailrace.app.calls.blocking import blocking
from tailrace.app.calls.refused import RolloutRejected
from tailrace.app.http.gateway_connection import GatewayConnection
from tailrace.deployments.features.wire import Features
from tailrace.deployments.results.routed_experts import RoutedExperts


class VersionSpan(BaseModel):
    """Tokens `[start, end)` of a row, which one weights version made."""

    version: int
    start: int
    end: int


class RowTurn(BaseModel):
    """An answer in a row, at `[start, end)`. `turn`, `parent`: its number and that of the turn that it continues.
    `reencoded_tokens`: sampled tokens of earlier answers that its prompt has as text encoded again.
    """

    turn: int
    parent: int | None
    start: int
    end: int
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: str
    reencoded_tokens: int


class TrajectoryRow(BaseModel):
    """One value a token. `mask`: 1 for a sampled token, in one row alone. `logprobs`: 0 for tokens of prompts.
    `routed_experts`: of all tokens but the last, if the engine keeps them. `features`: of its images, as
    `/inference/v1/generate` takes them with the `token_ids`; None without images.
    """

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    turns: tuple[RowTurn, ...]
    routed_experts: RoutedExperts | None = None
    features: Features | None = None


class TrajectoryRows(BaseModel):
    """A trajectory so far: a row for each turn that no other continues."""

    model_config = ConfigDict(extra="ignore")
    id: str
    group: str
    index: int
    reward: float | None
    rows: tuple[TrajectoryRow, ...]
    turns: int
    branches: int
    sampled_tokens: int
    reencoded_tokens: int


class CapturedTrajectory:
    """Made by `Client.trajectory`. `base_url`, `api_key`: for the harness, in place of OpenAI's or Anthropic's. Leaving
    it as a context ends it without a reward, if it has not ended.
    """

    def __init__(self, connection: GatewayConnection, opened: dict):
        self.id, self.base_url, self.api_key = opened["id"], opened["base_url"], opened["api_key"]
        self._connection, self._is_ended = connection, False

    async def rows(self) -> TrajectoryRows:
        """Returns the training rows so far. Raises PermissionError or ValueError once the trajectory has ended."""
        return await self._ask("GET", "")

    rows_blocking = blocking(rows)

    async def reward(self, reward: float) -> TrajectoryRows:
        """Ends the trajectory with its reward. Returns its rows, which the service then drops."""
        found = await self._ask("POST", "/reward", {"reward": reward})
        self._is_ended = True
        return found

    reward_blocking = blocking(reward)

    async def close(self) -> TrajectoryRows | None:
        """Ends the trajectory without a reward. Returns its rows, or None if it was ended here. Raises PermissionError
        or ValueError if it has ended elsewhere.
        """
        if self._is_ended:
            return None
        found = await self._ask("DELETE", "")
        self._is_ended = True
        return found

    close_blocking = blocking(close)

    async def __aenter__(self) -> "CapturedTrajectory":
        return self

    async def __aexit__(self, *error) -> None:
        with suppress(PermissionError, RolloutRejected):  # it has ended: by its limit of seconds, or by who has its key
            await self.close()

    async def _ask(self, method: str, path: str, body: dict | None = None) -> TrajectoryRows:
        key = {"authorization": f"Bearer {self.api_key}".encode()}
        found = await self._connection.repeated(
            self._connection.once, method, f"/v1/trajectories/{self.id}{path}", body, key
        )
        return TrajectoryRows.model_validate(found)
