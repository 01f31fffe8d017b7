"""One turn of a trajectory in progress: what its chat may continue, its sample's names, and its record."""

import json
from collections.abc import Awaitable, Callable, Sequence

from tailrace.app.gateway.answers import FINISH, weight_versions
from tailrace.app.gateway.chat.chat import Chat
from tailrace.app.gateway.chat.conversations import AnsweredTurn, digest_of
from tailrace.app.gateway.chat.messages import RequestedMessage
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.trajectories.tree import BegunTurn, TrajectoryTree
from tailrace.deployments.messages.session import SampleAnswer
from tailrace.deployments.messages.trajectory import StoredResponse, TrajectoryTurn
from tailrace.deployments.results.columns import Column

MAX_TOOL = 100
"""Maximum characters of a tool's name, by which its time is learnt."""


class TurnInProgress:
    """The turns that a chat may continue (`AnsweredTurns`), and the record of its answer. `record`: adds it to the
    trajectory.
    """

    def __init__(self, tree: TrajectoryTree, record: Callable[[TrajectoryTurn], Awaitable[None]]):
        self.tree, self._record = tree, record
        self._conversation, self._closing = b"", None
        self._stored: StoredResponse | None = None
        self._added: list[dict] = []
        self._chat: Chat | None = None
        self._begun: BegunTurn

    @property
    def model(self) -> str | None:
        """Returns the name of the model or adapter that makes the turn; None for the served model."""
        return self.tree.opening.model

    @property
    def answer(self) -> dict:
        """Returns the message of a chat's ended answer."""
        return self._chat.answer

    def find(self, digest: bytes) -> AnsweredTurn | None:
        return self.tree.find(digest)

    def keep(self, digest: bytes, turn: AnsweredTurn) -> None:
        self._conversation, self._closing = digest, turn.closing

    def store(self, response: str, previous: str | None, added: list[dict]) -> None:
        """Has the turn stored under a response's name. `added`: messages beyond those of `previous`."""
        self._stored, self._added = StoredResponse(id=response, previous=previous, messages=""), added

    def begin(self, token_ids: Sequence[int], chat: Chat | None) -> tuple[Naming, int]:
        """Returns the names of the turn's sample, and the tokens that are left. `chat`: None for a prompt without
        messages. Raises ValueError, one line, at a limit.
        """
        messages = () if chat is None else chat.request.messages
        said = [said_digest(one) for one in messages if one.role == "assistant"]
        images = () if chat is None else chat.images
        self._chat, self._begun = chat, self.tree.begin(token_ids, said, images)
        opening = self.tree.opening
        settings = opening.settings
        naming = Naming(
            seed=settings.seed,
            step=settings.step,
            group=opening.group,
            index=opening.index,
            turn=self._begun.turn,
            branches=True,
            weights_version=settings.weights_version,
        )
        return naming, opening.limits.tokens - self.tree.sampled_tokens

    async def end(self, answer: SampleAnswer) -> None:
        """Records the turn. Raises UnknownTrajectory if the trajectory has ended meanwhile."""
        begun, sample, stored = self._begun, answer.sample, self._stored
        if stored is not None:
            stored = stored.model_copy(update={"messages": json.dumps([*self._added, self.answer])})
        turn = TrajectoryTurn(
            parent=begun.parent,
            turn=begun.turn,
            conversation=self._conversation,
            message=b"" if self._chat is None else said_digest(RequestedMessage(**self.answer)),
            closing=self._closing,
            prompt_token_ids=Column(begun.prompt),
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            versions=tuple((int(one["version"]), one["start"], one["end"]) for one in weight_versions(sample)),
            finish_reason=FINISH[sample.finish_reason],
            reencoded_tokens=begun.reencoded_tokens,
            prompt_key=answer.prompt_key,
            response=stored,
            tool=self._tool(),
            routed_experts=sample.routed_experts,
            images=begun.images,
        )
        await self._record(turn)
        self.tree.begun.discard(begun)  # not before: an equal prompt would get its key meanwhile

    def _tool(self) -> str:
        """Returns the name of the first tool that the answer calls, or an empty one."""
        calls = () if self._chat is None else self.answer.get("tool_calls") or ()
        return calls[0]["function"]["name"][:MAX_TOOL] if calls else ""


def said_digest(message: RequestedMessage) -> bytes:
    """Returns the digest of an answer without its thoughts, which many harnesses do not send back."""
    return digest_of({name: part for name, part in message.normal().items() if name != "reasoning"})
