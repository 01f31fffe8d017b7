"""The turns of one trajectory as a tree, as far as this gateway knows it.

A prompt continues the turn whose context, prompt and answer, is its longest prefix, token by token and image by image;
it is the root of a branch if there is none. Invariant: the tree only grows, and a turn's context never changes.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from weakref import WeakSet

import numpy as np

from tailrace.app.gateway.chat.conversations import AnsweredTurn
from tailrace.app.gateway.edge.errors import UnknownTrajectory
from tailrace.app.gateway.images.prompt_images import spans_of
from tailrace.deployments.messages.trajectory import PromptImage, StoredResponse, TrajectoryOpening, TrajectoryTurn
from tailrace.deployments.results.columns import Column

AGAIN = 1 << 16
"""Step of the key's turn between samples of one prompt; turns of one line count below it."""


class BegunTurn:
    """A prompt that waits for its answer. `parent`, `turn`, `reencoded_tokens`, `images`: see TrajectoryTurn."""

    def __init__(
        self, parent: int | None, turn: int, prompt: np.ndarray, reencoded_tokens: int, images: tuple[PromptImage, ...]
    ):
        self.parent, self.turn, self.prompt, self.reencoded_tokens = parent, turn, prompt, reencoded_tokens
        self.images = images


class TrajectoryTree:
    """`turns`: by their numbers. `begun`: prompts without an answer yet, while their requests are open."""

    def __init__(self, opening: TrajectoryOpening, epoch: str):
        self.opening, self.epoch = opening, epoch
        self.turns: list[TrajectoryTurn] = []
        self.begun: WeakSet[BegunTurn] = WeakSet()
        self._children: dict[int | None, list[int]] = {None: []}
        self._depths: list[int] = []
        self._conversations: dict[bytes, int] = {}
        self._responses: dict[str, StoredResponse] = {}
        self._answers: dict[bytes, int] = {}  # sampled tokens by digest of the message

    def add(self, turns: Iterable[TrajectoryTurn]) -> None:
        for turn in turns:
            number = len(self.turns)
            self.turns.append(turn)
            self._children[number] = []
            self._children[turn.parent].append(number)
            self._depths.append(0 if turn.parent is None else self._depths[turn.parent] + 1)
            self._answers[turn.message] = len(turn.token_ids)
            if turn.response is not None:
                self._responses[turn.response.id] = turn.response
            if turn.conversation:
                self._conversations[turn.conversation] = number

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def branches(self) -> int:
        """Returns the number of turns that are not the first to continue their parent."""
        return sum(max(0, len(children) - 1) for children in self._children.values())

    def leaves(self) -> list[int]:
        """Returns the turns that no other one continues."""
        return [number for number in range(len(self.turns)) if not self._children[number]]

    def line(self, number: int | None) -> list[int]:
        """Returns the turns from a root to this one."""
        found = []
        while number is not None:
            found.append(number)
            number = self.turns[number].parent
        return found[::-1]

    def context(self, number: int) -> np.ndarray:
        """Returns the tokens up to a turn's end, int32."""
        parts = [part for one in self.line(number) for part in _parts(self.turns[one])]
        return np.concatenate(parts).astype(np.int32)

    def find(self, conversation: bytes) -> AnsweredTurn | None:
        """Returns the turn whose messages have this digest."""
        number = self._conversations.get(conversation)
        if number is None:
            return None
        return AnsweredTurn(self.context(number), self.turns[number].closing, spans_of(self.images(number)))

    def images(self, number: int) -> list[PromptImage]:
        """Returns the images up to a turn's end."""
        return [image for one in self.line(number) for image in self.turns[one].images]

    def said(self, response: str | None) -> list[dict]:
        """Returns the messages up to a response, without instructions. Raises UnknownTrajectory if it is not stored."""
        found: list[dict] = []
        left = dict(self._responses)  # each is said once, so that names in a circle end, too
        while response is not None:
            if (stored := left.pop(response, None)) is None:
                raise UnknownTrajectory(f"previous_response_id: {response[:80]!r} is not a response of this trajectory")
            found = json.loads(stored.messages) + found
            response = stored.previous
        return found

    def begin(
        self, token_ids: Sequence[int], messages: Iterable[bytes], images: tuple[PromptImage, ...] = ()
    ) -> BegunTurn:
        """Begins a turn. `messages`: digests of the answers that its prompt has; `images`: all that it has. Raises
        ValueError, one line, at a limit.
        """
        prompt = np.asarray(token_ids, np.int32)
        parent = self._parent_of(prompt, images)
        at = 0 if parent is None else len(self.context(parent))
        own = _between(images, at, len(prompt))
        turn = self._turn(parent, prompt[at:], own)
        begun = BegunTurn(parent, turn, prompt[at:], self._reencoded(parent, messages), own)
        self._check(begun)
        self.begun.add(begun)
        return begun

    def moved(self, turn: TrajectoryTurn, other: "TrajectoryTree") -> TrajectoryTurn:
        """Returns a turn of another tree of this trajectory as it is in this one, which may lack turns."""
        before = [] if turn.parent is None else other.context(turn.parent).tolist()
        images = (*([] if turn.parent is None else other.images(turn.parent)), *turn.images)
        prompt = np.array([*before, *turn.prompt_token_ids], np.int32)
        parent = self._parent_of(prompt, images)
        at = 0 if parent is None else len(self.context(parent))
        own = {"prompt_token_ids": Column(prompt[at:]), "images": _between(images, at, len(prompt))}
        return turn.model_copy(update={"parent": parent} | own)

    def _parent_of(self, prompt: np.ndarray, images: Sequence[PromptImage]) -> int | None:
        best, best_at, waiting = None, 0, [(None, 0)]
        while waiting:
            parent, at = waiting.pop()
            if at > best_at:
                best, best_at = parent, at
            for child in self._children[parent]:
                own = np.concatenate(_parts(self.turns[child]))
                end = at + len(own)
                same = end < len(prompt) and np.array_equal(own, prompt[at:end])
                if same and _places(self.turns[child].images) == _places(_between(images, at, end)):
                    waiting.append((child, end))
        return best

    def _turn(self, parent: int | None, prompt: np.ndarray, images: Sequence[PromptImage]) -> int:
        """Returns the turn of the key: its place in its line, and the lowest number that no other sample of this prompt
        has.
        """
        turns = [self.turns[child] for child in self._children[parent]]
        others = [(one.turn, one.prompt_token_ids, one.images) for one in turns]
        others += [(one.turn, one.prompt, one.images) for one in self.begun if one.parent == parent]
        places = _places(images)
        same = [turn for turn, one, of in others if np.array_equal(np.asarray(one), prompt) and _places(of) == places]
        taken = {turn // AGAIN for turn in same}
        again = next(number for number in count() if number not in taken)
        return AGAIN * again + (0 if parent is None else self._depths[parent] + 1)

    def _reencoded(self, parent: int | None, messages: Iterable[bytes]) -> int:
        text = Counter(messages) - Counter(self.turns[one].message for one in self.line(parent))
        return sum(count * self._answers.get(message, 0) for message, count in text.items())

    def _check(self, begun: BegunTurn) -> None:
        limits, name = self.opening.limits, "the trajectory has ended its"
        if len(self.turns) + len(self.begun) >= limits.turns:
            raise ValueError(f"limits.turns: {name} {limits.turns} turns")
        if self.sampled_tokens >= limits.tokens:
            raise ValueError(f"limits.tokens: {name} {limits.tokens} tokens")
        kept = sum(len(image.sent) for turn in (*self.turns, *self.begun, begun) for image in turn.images)
        if kept > limits.image_bytes:
            raise ValueError(f"limits.image_bytes: the trajectory's images have {kept} bytes of {limits.image_bytes}")
        lines = Counter({parent: len(children) for parent, children in self._children.items() if children})
        lines.update(one.parent for one in self.begun)
        if lines[begun.parent] and sum(lines.values()) - len(lines) >= limits.branches:
            raise ValueError(f"limits.branches: {name} {limits.branches} branches")


def _places(images: Iterable[PromptImage]) -> list[tuple[str, int, int]]:
    return [image.place for image in images]


def _between(images: Iterable[PromptImage], start: int, end: int) -> tuple[PromptImage, ...]:
    """Returns the images whose placeholders begin at positions [start, end) of a prompt."""
    return tuple(image for image in images if start <= image.offset < end)


def _parts(turn: TrajectoryTurn) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(turn.prompt_token_ids), np.asarray(turn.token_ids)
