"""Messages of open sessions: single samples are requested at any time, under the settings of one batch.

Tokens are a function of seed, step, group, index and turn, as those of a `RolloutBatch` whose prompt_id is the group's
name; never of the order of requests. Made by `app.calls.session` (requests) and by the coordinator (answers).
"""

from collections.abc import Set
from math import inf
from typing import Self

from pydantic import Field, model_validator

from tailrace.deployments.messages.rollout import Mask, Message, PromptGroup, RequestMessage, SampleResult, Top
from tailrace.deployments.results.columns import TokenColumn

MAX_INDEX = 2**31 - 1
"""Maximum index of a sample: drafts carry 32-bit indexes."""


MAX_HOLD_S = 3600.0
"""Maximum seconds that a sample may be held, an hour: a tool that takes longer costs less than the KV that would wait
for it.
"""

STREAM_CHUNK_TOKENS = 32
"""Maximum chunk length, in tokens, of a sample that is streamed. A stream shows nothing within a chunk, and each chunk
costs about 30 ms: 480 tokens of a small model took 2.4 s in one chunk, 2.8 s in chunks of 32, 3.9 s in chunks of 8 (two
cores, a pool).
"""


class SampleRequest(RequestMessage):
    """One sample of a prompt, or one turn of it. `group`: a PromptGroup of one sample; its prompt_id names the group in
    the session. The prompt of a later turn begins with the earlier one's prompt and tokens."""

    group: PromptGroup
    index: int = Field(0, ge=0, le=MAX_INDEX, description="of the sample in its group; enters its key")
    of: int | None = Field(None, ge=1, description="samples that the group will have; a hint, null: not known")
    together: int = Field(
        1,
        ge=1,
        description="samples asked for at once with it, of equal max_tokens: quotas that never hold all refuse it",
    )
    chunk_tokens: int | None = Field(None, ge=1, description="bound of its chunks; null: as the policies say")
    deadline_s: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="seconds after which it ends with the tokens so far"
    )
    turn: int = Field(0, ge=0, le=MAX_INDEX, description="of the sample; enters its key")
    hold_s: float = Field(
        0.0, ge=0.0, le=MAX_HOLD_S, description="seconds for which the sample's KV is held for its next turn; 0: not"
    )
    branches: bool = Field(
        False,
        description="held as `policies.trajectories` says, without `hold_s`; a prompt that does not continue it is a "
        "branch, beside which it stays held",
    )

    @property
    def held_s(self) -> float:
        """Returns `hold_s` as the core takes it."""
        return inf if self.branches else self.hold_s

    def without_data(self, names: Set[str]) -> Self:
        """Returns the request without the data of the items of its features that have one of `names`."""
        features = self.group.features
        if features is None or not any(name in names for of in features.mm_hashes.values() for name in of):
            return self
        group = self.group.model_copy(update={"features": features.without(names)})
        return self.model_copy(update={"group": group})

    @model_validator(mode="after")
    def _one_sample(self) -> Self:
        if self.group.samples != 1:
            raise ValueError(f"group.samples is {self.group.samples}; a request is for one sample")
        if self.group.forced_token_ids is not None:
            raise ValueError("forced_token_ids replays recorded answers; give a RolloutBatch for that")
        return self


COLUMNS = "token_ids", "logprobs", "raw_logprobs", "top_logprobs", "sampling_mask"


class SampleTokens(Message):
    """More tokens of a running sample, from answer position `start` on. Tokens that were sent never change.

    Logprobs: as in SampleResult. `prompt_token_ids`: in the first message of a stream alone, which comes once the
    sample is accepted. `answer`: the whole sample, in the last message alone.
    """

    prompt_token_ids: tuple[int, ...] | None = None
    start: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Top, ...] = ()
    sampling_mask: tuple[Mask, ...] = ()
    answer: "SampleAnswer | None" = None

    def beyond(self, position: int) -> "SampleTokens":
        """Returns the message without the tokens before answer position `position`."""
        cut = max(0, position - self.start)
        return self.model_copy(
            update={"start": self.start + cut} | {name: getattr(self, name)[cut:] for name in COLUMNS}
        )


class SampleAnswer(Message):
    """An ended sample of a session. `group`: the name of its group; `sample.sample_index`: its index there."""

    batch_id: str
    group: str
    prompt_token_ids: TokenColumn
    prompt_key: str
    step: int
    sample: SampleResult
