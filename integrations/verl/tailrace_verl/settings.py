"""The settings that this plug-in reads from verl's configuration.

Invariant: an unknown key is an error that names it. Read by the replica, which hands it to the server.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

KEYS = "actor_rollout_ref.rollout.engine_kwargs.tailrace"
SERVER = "tailrace_verl_server"
"""Name of the server's actor in the Ray namespace of the run."""


class Settings(BaseModel):
    """`weights_dir`: a folder that the trainer's rank 0 and all nodes of the service see, in place of memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights_dir: Path | None = None
    address: str = "auto"
    app_name: str = "tailrace"
    whole_groups: bool = True
    """The agent loops give the size of a group where the configuration makes it certain."""
    max_concurrency: int = 16384
    """Requests of the server in flight; more would wait in Ray's queue."""


def settings(engine_kwargs: Mapping) -> Settings:
    """Of `rollout.engine_kwargs`. Raises ValueError, one line with the key."""
    try:
        return Settings.model_validate(dict(engine_kwargs.get("tailrace") or {}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{KEYS}.{place}: {first['msg']}") from error
