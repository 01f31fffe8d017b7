"""Rollouts on disk: one finished group a line, appended as it arrives, so that a run can be continued.

Invariant: a group is written once. Each line carries a digest of its request, and its segments the digests of their
weights, so runs with different settings never mix.
"""

import json
from hashlib import blake2b
from pathlib import Path

from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.lines_file import LinesFile
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup


def request_digest(prompt: PromptGroup, seed: int, step: int) -> str:
    """Returns a digest of all that decides a group's tokens, except the weights: prompt, sampling, samples, max_tokens,
    seed, step.
    """
    text = json.dumps([prompt.model_dump(mode="json"), seed, step], sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


class ResultsFile:
    """Open for appending. Raises BadInput when the file cannot be written, is in use or holds something else."""

    def __init__(self, path: Path):
        self.path = path
        self.weights: set[str] = set()  # digests of the last segments of all samples
        self.done: dict[str, str] = {}  # digests of finished groups, by prompt id
        self._lines = LinesFile(path, "a rollout of ours", ("prompt_id", "request"))
        self._lines.read(self._take)

    def _take(self, group: dict) -> None:
        self.done[group["prompt_id"]] = group["request"]
        self.weights |= {weights_of(sample["segments"]) for sample in group["samples"]} - {""}

    def missing(self, prompts: list[PromptGroup], seed: int, step: int) -> list[PromptGroup]:
        """Returns the prompts without a finished group. Raises BadInput if one was finished with other settings."""
        for prompt in prompts:
            asked = request_digest(prompt, seed, step)
            if self.done.get(prompt.prompt_id, asked) != asked:
                raise BadInput(
                    f"{self.path}: prompt {prompt.prompt_id!r} is there with other settings; "
                    "remove the file or give another --out"
                )
        return [prompt for prompt in prompts if prompt.prompt_id not in self.done]

    def check_weights(self, digest: str) -> None:
        """Raises BadInput if the groups were made by other weights than the service's. `digest`: empty if not known
        yet.
        """
        if digest and (others := self.weights - {digest}):
            raise BadInput(
                f"{self.path}: its groups are of weights {', '.join(sorted(others))}, the service has {digest}; "
                "give another --out"
            )

    def append(self, group: GroupResult, prompt: PromptGroup, seed: int, step: int) -> None:
        """Appends a group. Raises Failed, and keeps all earlier groups, if the disk is full."""
        line = {
            "prompt_id": group.prompt_id,
            "request": request_digest(prompt, seed, step),
            "prompt_token_ids": group.prompt_token_ids.tolist(),
            "samples": [sample.model_dump(mode="json") for sample in group.samples],
        }
        try:
            self._lines.append(line)
        except OSError as error:
            kept = f"{len(self.done)} groups are in it"
            raise Failed(f"{self.path}: {error.strerror}; {kept}, mend it and run again for the rest") from error
        self.done[group.prompt_id] = line["request"]

    def close(self) -> None:
        self._lines.close()


def weights_of(segments: list[dict]) -> str:
    """Returns the digest of the weights that made the last segment; empty without one."""
    return segments[-1].get("weights_digest", "") if segments else ""
