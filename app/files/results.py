"""Rollouts on disk: one finished group a line, appended as it comes, so that a run can be taken up again.

Invariant: a line is whole or it is cut off when the file is opened again; a group is written once. Each line carries
a digest of its request, so runs with different settings never mix.
"""

import json
import os
from hashlib import blake2b
from pathlib import Path

from tailrace.app.errors import BadInput
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup


def request_digest(prompt: PromptGroup, seed: int, step: int) -> str:
    """Digest of everything but the weights that decides a group's tokens: prompt, sampling, samples, max_tokens, seed,
    step."""
    text = json.dumps([prompt.model_dump(mode="json"), seed, step], sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


class ResultsFile:
    """Open for appending. Raises BadInput when the file cannot be written or holds something else."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise BadInput(f"{path}: cannot be written: {error.strerror}; give another --out") from error
        self.done = self._read()

    def _read(self) -> dict[str, str]:
        """Digests by prompt id of the groups that are there; a half-written last line is cut off."""
        self._file.seek(0)
        done, good = {}, 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                group = json.loads(line)
                done[group["prompt_id"]] = group["request"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise BadInput(f"{self.path} line {number}: not a rollout of ours; give another --out") from error
            good += len(line)
        self._file.truncate(good)
        return done

    def missing(self, prompts: list[PromptGroup], seed: int, step: int) -> list[PromptGroup]:
        """The prompts still to do. Raises BadInput when one was done with other settings."""
        for prompt in prompts:
            asked = request_digest(prompt, seed, step)
            if self.done.get(prompt.prompt_id, asked) != asked:
                raise BadInput(
                    f"{self.path}: prompt {prompt.prompt_id!r} is there with other settings; "
                    "remove the file or give another --out"
                )
        return [prompt for prompt in prompts if prompt.prompt_id not in self.done]

    def append(self, group: GroupResult, prompt: PromptGroup, seed: int, step: int) -> None:
        line = {
            "prompt_id": group.prompt_id,
            "request": request_digest(prompt, seed, step),
            "prompt_token_ids": group.prompt_token_ids,
            "samples": [sample.model_dump(mode="json") for sample in group.samples],
        }
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done[group.prompt_id] = line["request"]

    def close(self) -> None:
        self._file.close()
