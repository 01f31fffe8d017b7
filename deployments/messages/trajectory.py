"""Messages of trajectories: turns that a gateway captured from an agent, as a tree. Made and read by gateways."""

from pydantic import Field, model_validator

from tailrace.deployments.messages.message import Message, Name, RequestMessage
from tailrace.deployments.messages.rollout import BatchSettings
from tailrace.deployments.messages.sampling import SamplingParams, StructuredOutputs
from tailrace.deployments.messages.session import MAX_INDEX
from tailrace.deployments.results.columns import LogprobColumn, TokenColumn
from tailrace.deployments.results.routed_experts import RoutedExperts

MAX_TURNS = 10_000
"""Maximum turns of one trajectory: the median of recorded coding agents has 45, and each costs the gateway's look for a
prefix some microseconds.
"""

MAX_SECONDS = 7 * 24 * 3600.0
"""Maximum seconds of one trajectory, a week."""


class TrajectoryLimits(RequestMessage):
    """Limits of one trajectory; a turn beyond one of them is refused."""

    turns: int = Field(256, ge=1, le=MAX_TURNS, description="answers, over all branches")
    tokens: int = Field(1_000_000, ge=1, description="sampled tokens, over all branches; the last answer is cut to it")
    seconds: float = Field(3600.0, gt=0.0, le=MAX_SECONDS, description="until it ends by itself, and is dropped")
    branches: int = Field(64, ge=0, le=MAX_TURNS, description="prompts that do not continue the latest one's line")
    image_bytes: int = Field(128 << 20, ge=0, description="of images' files, over all branches")


class TrajectorySampling(RequestMessage):
    """Sampling parameters that all answers of a trajectory have, whatever its harness asks for: a trainer chooses the
    distribution, and harnesses set a temperature of their own. A field that is not given is the harness's.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _valid(self):
        self.over(SamplingParams())
        return self

    def over(self, asked: SamplingParams) -> SamplingParams:
        """Returns what a harness asked for, with these values. Raises ValueError if both do not fit together."""
        own = {name: value for name, value in self if value is not None}
        return SamplingParams(**dict(asked) | own) if own else asked


class TrajectoryOpening(RequestMessage):
    """What a trajectory is opened with. `key_digest`: SHA-256 of its key, in hexadecimal digits. `model`: name of an
    adapter, or of the model.
    """

    trajectory_id: Name
    key_digest: Name
    settings: BatchSettings
    group: Name
    index: int = Field(0, ge=0, le=MAX_INDEX)
    model: Name | None = None
    limits: TrajectoryLimits = TrajectoryLimits()
    sampling: TrajectorySampling = TrajectorySampling()


class StoredResponse(Message):
    """What a later request needs that names a response. `messages`: JSON of the messages that it added, its answer
    last. `previous`: the response that it named itself, or None.
    """

    id: str
    previous: str | None
    messages: str


class PromptImage(Message):
    """An image of a prompt. `name`: of its processed content, as PromptFeatures names items. `offset`, `length`: its
    placeholder in the prompt, in tokens. `sent`: its file.
    """

    name: str
    offset: int
    length: int
    sent: bytes

    @property
    def place(self) -> tuple[str, int, int]:
        """Returns what a prompt depends on."""
        return self.name, self.offset, self.length


class TrajectoryTurn(Message):
    """One answer of a trajectory, and the tokens of its prompt beyond its parent's context.

    `parent`: number of the turn that it continues, by its place in the trajectory, or None. `turn`: the number in its
    sample's key. `conversation`: digest of the messages up to its answer, empty if no later prompt can begin with the
    sampled tokens. `message`: digest of the answer's message alone; both are empty without messages. `closing`: the
    token that ends the answer, or None. `versions`: (weights version, first token, end) by spans of the answer.
    `reencoded_tokens`: sampled tokens of earlier answers that this prompt has as text encoded again. `response`: of the
    Responses API, if it is stored. `tool`: the first one that the answer calls, or empty. `images`: those
    of its part of the prompt; their offsets count from the root's begin on.
    """

    parent: int | None
    turn: int
    conversation: bytes
    message: bytes
    closing: int | None
    prompt_token_ids: TokenColumn
    token_ids: TokenColumn
    logprobs: LogprobColumn
    versions: tuple[tuple[int, int, int], ...]
    finish_reason: str
    reencoded_tokens: int
    prompt_key: str
    response: StoredResponse | None = None
    tool: str = ""
    routed_experts: RoutedExperts | None = None
    images: tuple[PromptImage, ...] = ()


class TrajectoryState(Message):
    """A trajectory as the coordinator holds it. `opening`: None if it holds none of that id. `turns`: those that the
    asker did not know. `left_s`: seconds until it ends. `epoch`: name of this coordinator.
    """

    opening: TrajectoryOpening | None
    turns: tuple[TrajectoryTurn, ...] = ()
    left_s: float = 0.0
    epoch: str
