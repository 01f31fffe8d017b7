"""Groups on disk as they end: a continued run reads them from there, with the tokens it would make again.

A file for each step. Its first line names the weights: groups of other weights are not used, unless any are accepted.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from tailrace.app.trl.step_rollout import given_up
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch

ANY_WEIGHTS = ""
"""Accepts any weights, in place of a digest."""


class StoredGroups:
    """`roll_out`: yields the groups of a batch that are not stored. `weights_digest`: returns the digest of the weights
    that a step's samples must have, or ANY_WEIGHTS.
    """

    def __init__(
        self,
        folder: Path,
        roll_out: Callable[[RolloutBatch], Iterator[GroupResult]],
        weights_digest: Callable[[], str],
    ):
        self._folder, self._roll_out, self._weights_digest = folder, roll_out, weights_digest

    def groups_of(self, batch: RolloutBatch) -> Iterator[GroupResult]:
        """Yields groups of the batch, the stored ones first. A group with a sample that was given up is not stored."""
        path, digest = _file_of(self._folder, batch.step), self._weights_digest()
        wanted = {group.prompt_id: (group.token_ids, group.samples) for group in batch.groups}
        stored = {
            group.prompt_id: group
            for group in _read(path, digest)
            if wanted.get(group.prompt_id) == (group.prompt_token_ids, len(group.samples)) and given_up(group) is None
        }
        _write(path, digest, stored.values())
        yield from stored.values()
        missing = tuple(group for group in batch.groups if group.prompt_id not in stored)
        if missing:
            with path.open("a") as file:
                for group in self._roll_out(batch.model_copy(update={"groups": missing})):
                    if given_up(group) is None:
                        file.write(group.model_dump_json() + "\n")
                        file.flush()
                    yield group


def store_groups(folder: Path, step: int, groups: Iterable[GroupResult]) -> None:
    """Writes all groups of a step that has been trained."""
    _write(_file_of(folder, step), ANY_WEIGHTS, groups)


def stored_groups(folder: Path) -> list[GroupResult]:
    """Returns all groups of a run, step by step."""
    return [group for path in sorted(folder.glob("step-*.jsonl")) for group in _read(path, ANY_WEIGHTS)]


def _file_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06}.jsonl"


def _write(path: Path, digest: str, groups: Iterable[GroupResult]) -> None:
    lines = [json.dumps({"weights_digest": digest}), *(group.model_dump_json() for group in groups)]
    part = path.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n")
    part.replace(path)


def _read(path: Path, digest: str) -> Iterator[GroupResult]:
    """Yields groups of a file up to the first line that a crash has cut off; none if they have other weights."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]  # answers may have other ends of lines
    if digest != ANY_WEIGHTS and lines[0] != json.dumps({"weights_digest": digest}).encode():
        return
    for line in lines[1:]:
        try:
            yield GroupResult.model_validate_json(line)
        except ValidationError:
            return
