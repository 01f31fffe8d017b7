"""Messages between engines and drafters: a list in one frame.

Positions are those of the context. A guess repeats all draft tokens from a confirmed position, so its reader compares
it with its own tokens; an overtaken or lost guess is harmless. Invariant: `decode` returns well-formed messages or
raises ValueError.
"""

import numpy as np

from tailrace.deployments.channel.codec import Codec, WireMessage

MAX_TOKENS = 1 << 24
"""Maximum context tokens of one message: above that of every model, and 64 MiB."""


class Open(WireMessage, eq=False):
    """To a drafter: draft for this sample, with the noise of `key`, after the context `tokens` (int32). Sent again
    under the same name it changes the mode and the end, and keeps the computed context. Raises ValueError for tokens of
    another type, or too many.
    """

    name: str
    key: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    prompt_tokens: int
    end: int  # drafts end before this position
    window: int
    coupled: bool
    tokens: np.ndarray

    def __post_init__(self) -> None:
        if self.tokens.dtype != np.int32 or len(self.tokens) > MAX_TOKENS:
            raise ValueError(f"tokens: {len(self.tokens)} of {self.tokens.dtype}, not up to {MAX_TOKENS} of int32")

    @property
    def terms(self) -> tuple:
        """All that is the same whenever the sample is opened: name, noise, sampling parameters, prompt's length."""
        sampling = self.temperature, self.top_p, self.top_k, self.min_p, self.stop_token_ids
        return self.name, self.key, sampling, self.prompt_tokens


class Confirm(WireMessage):
    """To a drafter: the sample's tokens from position `start`."""

    name: str
    start: int
    tokens: list[int]


class Stop(WireMessage):
    """To a drafter: end drafting for this sample."""

    name: str


class Guess(WireMessage):
    """To an engine: a draft after the first `start` tokens, which are confirmed. `tested`: draft tokens since the
    opening that were compared with the sample, all tokens before them being right; `accepted`: the right ones of these.
    Without tokens: the drafter will soon have some, once the engine waits for it.
    """

    name: str
    start: int
    tokens: list[int]
    tested: int
    accepted: int


class Unknown(WireMessage):
    """To an engine: the sample is not open at this drafter (any more); open it again."""

    name: str


class Stepped(WireMessage):
    """To an engine: the drafter's last step, one token of each of `samples`, took `step_us` microseconds."""

    samples: int
    step_us: int


Message = Open | Confirm | Stop | Guess | Unknown | Stepped

_codec = Codec(list[Message])


def encode(messages: list[Message]) -> bytes:
    """Returns one frame."""
    return _codec.encode(messages)


def decode(frame: bytes) -> list[Message]:
    """Returns the messages of a frame. Raises ValueError if it is malformed."""
    try:
        return _codec.decode(frame)
    except ValueError as error:
        raise ValueError(f"not a frame of drafting messages: {error}") from error
