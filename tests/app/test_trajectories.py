"""Trajectories without a service: the tree of turns, its rows, keys and limits, the book of the coordinator."""

import asyncio
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from tailrace.app.gateway.access_control import AccessControl
from tailrace.app.gateway.edge.errors import UnknownTrajectory
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.trajectories.requests import OpenRequest
from tailrace.app.gateway.trajectories.rows import rows_of, trajectory_body
from tailrace.app.gateway.trajectories.trajectories import GatewayTrajectories
from tailrace.app.gateway.trajectories.tree import AGAIN, TrajectoryTree
from tailrace.app.gateway.trajectories.turn import TurnInProgress
from tailrace.deployments.batches import trajectories as book
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import BatchSettings, Rejected, SampleResult
from tailrace.deployments.messages.trajectory import PromptImage, StoredResponse, TrajectoryOpening, TrajectoryTurn
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.policies.protocol.actions import SampleEnd


def opening(name: str = "a" * 32, **limits) -> TrajectoryOpening:
    settings = BatchSettings(batch_id="http-0-0")
    return TrajectoryOpening(
        trajectory_id=name, key_digest="0", settings=settings, group="g", index=3, limits=limits or {}
    )


def turn_of(begun, token_ids: list[int], **others) -> TrajectoryTurn:
    values = {
        "parent": begun.parent, "turn": begun.turn, "conversation": bytes(token_ids), "message": bytes(token_ids[-1:]),
        "closing": None, "prompt_token_ids": begun.prompt.tolist(), "token_ids": token_ids,
        "logprobs": [-1.0] * len(token_ids), "versions": ((0, 0, len(token_ids)),), "finish_reason": "stop",
        "reencoded_tokens": begun.reencoded_tokens, "prompt_key": "k", "images": begun.images,
    }  # fmt: skip
    return TrajectoryTurn(**values | others)


def answered(
    tree: TrajectoryTree, prompt: list[int], answer: list[int], messages=(), images=(), **others
) -> TrajectoryTurn:
    turn = turn_of(tree.begin(prompt, messages, images), answer, **others)
    tree.add([turn])
    return turn


@pytest.fixture
def tree() -> TrajectoryTree:
    return TrajectoryTree(opening(), "epoch")


def test_a_prompt_continues_the_turn_with_the_longest_context_that_it_begins_with(tree):
    first = answered(tree, [1, 2], [3, 4])
    second = answered(tree, [1, 2, 3, 4, 5], [6])
    assert (first.parent, first.turn) == (None, 0) and list(first.prompt_token_ids) == [1, 2]
    assert (second.parent, second.turn) == (0, 1) and list(second.prompt_token_ids) == [5]
    third = answered(tree, [1, 2, 3, 4, 5, 6, 7], [8])
    assert (third.parent, third.turn, list(third.prompt_token_ids)) == (1, 2, [7])
    branch = answered(tree, [1, 2, 3, 4, 9], [8])  # from the first answer
    assert (branch.parent, branch.turn, list(branch.prompt_token_ids)) == (0, 1, [9])
    compacted = answered(tree, [1, 2, 3], [4])  # ends within an answer
    assert (compacted.parent, list(compacted.prompt_token_ids)) == (None, [1, 2, 3])
    assert tree.branches == 2 and tree.leaves() == [2, 3, 4] and tree.line(2) == [0, 1, 2]


def test_the_same_prompt_again_is_another_sample_also_while_the_first_is_open(tree):
    begun = tree.begin([1], ()), tree.begin([1], ())
    assert [one.turn for one in begun] == [0, AGAIN]
    tree.begun.discard(begun[0])
    tree.add([turn_of(begun[0], [2])])
    assert tree.begin([1], ()).turn == AGAIN * 2
    del begun
    assert tree.begin([1], ()).turn == AGAIN, "a request that has gone leaves nothing"


def test_a_prompt_again_is_another_sample_also_after_one_of_its_requests_has_left(tree):
    """It got the answer of the request that had stayed, as its own."""
    left, stays = tree.begin([1], ()), tree.begin([1], ())
    del left
    assert tree.begin([1], ()).turn == 0, "while the other one is open"
    tree.add([turn_of(stays, [2])])
    assert stays.turn == AGAIN and tree.begin([1], ()).turn == 0, "once it has ended, and is a turn"
    tree.add([turn_of(tree.begin([1], ()), [3])])
    assert tree.begin([1], ()).turn == AGAIN * 2


def test_an_equal_prompt_is_another_sample_while_the_first_one_s_turn_is_recorded(tree):
    """It got the same key, and so the same answer."""
    sample = SampleResult(
        sample_index=0, token_ids=(2,), text="", logprobs=(-1.0,), raw_logprobs=(), finish_reason=SampleEnd.STOP
    )
    others = []

    async def record(turn):
        others.append(tree.begin([1], ()).turn)
        tree.add([turn])

    turn = TurnInProgress(tree, record)
    turn.begin([1], None)
    asyncio.run(turn.end(SimpleNamespace(sample=sample, prompt_key="k")))
    assert others == [AGAIN] and not tree.begun and len(tree.turns) == 1


def routes(*first: int) -> RoutedExperts:
    """One layer, two experts."""
    return RoutedExperts(np.array([[[one, one + 1]] for one in first], np.uint8))


def test_a_row_has_the_routes_that_made_its_tokens_though_a_later_turn_computed_the_context_again(tree):
    answered(tree, [1, 2], [3, 4], routed_experts=routes(10, 11, 12))
    answered(tree, [1, 2, 3, 4, 5], [6], routed_experts=routes(13, 14))  # continues where the turn before ended
    again = routes(20, 21, 22, 23, 24, 25, 26)
    answered(tree, [1, 2, 3, 4, 5, 6, 7], [8], routed_experts=again)  # in a session that had nothing of it
    (row,) = rows_of(tree)
    found = RoutedExperts.of(row["routed_experts"]).array[:, 0, 0].tolist()
    assert found == [10, 11, 12, 13, 14, 25, 26] and len(found) == len(row["token_ids"]) - 1


def test_a_row_has_no_routes_if_a_turn_has_none(tree):
    answered(tree, [1, 2], [3, 4], routed_experts=routes(10, 11, 12))
    answered(tree, [1, 2, 3, 4, 5], [6])
    assert "routed_experts" not in rows_of(tree)[0]


def test_rows_train_each_sampled_token_once_whatever_the_branches(tree):
    rng = Random(0)
    for number in range(40):
        at = rng.choice([None, *range(len(tree.turns))])
        context = [] if at is None else tree.context(at).tolist()
        answered(tree, [*context, *(rng.randrange(99) for _ in range(rng.randint(1, 4)))], [100 + number] * 3,
                 versions=((7, 0, 1), (8, 1, 3)))  # fmt: skip
    rows = rows_of(tree)
    trained = [token for row in rows for token, one in zip(row["token_ids"], row["mask"], strict=True) if one]
    assert sorted(trained) == sorted([100 + number for number in range(40)] * 3)
    for row in rows:
        assert len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"])
        for turn in row["turns"]:
            assert row["token_ids"][turn["start"] : turn["end"]] == [100 + turn["turn"]] * 3
            assert row["logprobs"][turn["start"] : turn["end"]] == [-1.0] * 3
            first, second = turn["weight_versions"]
            assert (first["version"], first["start"], second["version"]) == (7, turn["start"], 8)
            assert first["end"] == second["start"] and second["end"] == turn["end"]
        parents = [turn["parent"] for turn in row["turns"]]
        assert parents == [None, *(turn["turn"] for turn in row["turns"][:-1])]
    assert len(rows) == len(tree.leaves()) == tree.branches + 1
    assert trajectory_body(tree, 0.5)["sampled_tokens"] == 120


def test_sampled_tokens_that_a_prompt_has_as_text_are_counted(tree):
    answered(tree, [1], [2, 3, 4], message=b"one")
    going = answered(tree, [1, 2, 3, 4, 5], [6], messages=[b"one"], message=b"two")
    assert going.reencoded_tokens == 0, "its tokens are the sampled ones"
    again = answered(tree, [7, 2, 33, 5], [6], messages=[b"one", b"two", b"of another"])
    assert again.reencoded_tokens == 4 and trajectory_body(tree)["reencoded_tokens"] == 4


@pytest.mark.parametrize(
    ("limits", "name"), [({"turns": 2}, "turns"), ({"tokens": 4}, "tokens"), ({"branches": 0}, "branches")]
)
def test_a_turn_beyond_a_limit_is_refused_in_one_line(limits, name):
    tree = TrajectoryTree(opening(**limits), "epoch")
    answered(tree, [1], [2, 3])
    answered(tree, [1, 2, 3, 4], [5, 6])
    with pytest.raises(ValueError, match=f"limits.{name}: the trajectory has"):
        tree.begin([9] if name == "branches" else [1, 2, 3, 4, 5, 6, 7], ())


def test_requests_in_progress_count_for_the_limit_of_turns():
    tree = TrajectoryTree(opening(turns=2), "epoch")
    held = [tree.begin([number], ()) for number in range(2)]
    with pytest.raises(ValueError, match=r"limits\.turns"):
        tree.begin([9], ())
    assert len(held) == 2


def test_requests_in_progress_count_for_the_limit_of_branches():
    """Any number of calls at once passed it."""
    tree = TrajectoryTree(opening(branches=2), "epoch")
    held = [tree.begin([number], ()) for number in range(3)]
    with pytest.raises(ValueError, match=r"limits\.branches"):
        tree.begin([9], ())
    tree.begun.discard(held[0])
    tree.add([turn_of(held[0], [5])])
    assert tree.begin([0, 5, 1], ()).parent == 0, "it goes on"
    with pytest.raises(ValueError, match=r"limits\.branches"):
        tree.begin([9], ())


def test_messages_of_stored_responses_are_those_of_the_chain(tree):
    for number, previous in enumerate((None, "r0", "r1")):
        messages = f'[{{"role": "user", "content": "{number}"}}]'
        answered(tree, [number], [1], response=StoredResponse(id=f"r{number}", previous=previous, messages=messages))
    assert [one["content"] for one in tree.said("r2")] == ["0", "1", "2"] and tree.said(None) == []
    with pytest.raises(UnknownTrajectory, match="previous_response_id: 'r9'"):
        tree.said("r9")


def test_stored_responses_that_name_each_other_are_refused(tree):
    """A client's own ids made such circles, and a gateway never answered again."""
    for number, previous in enumerate(("r1", "r0")):
        stored = StoredResponse(id=f"r{number}", previous=previous, messages='[{"role": "user", "content": "a"}]')
        answered(tree, [number], [1], response=stored)
    with pytest.raises(UnknownTrajectory, match="previous_response_id: 'r1'"):
        tree.said("r1")


# ---- images ------------------------------------------------------------------------------------------


def image(name: str, offset: int, length: int = 2, sent: bytes = b"file") -> PromptImage:
    return PromptImage(name=name, offset=offset, length=length, sent=sent)


def test_a_prompt_with_another_image_of_equal_tokens_is_a_branch(tree):
    first = answered(tree, [1, 7, 7, 2], [3], images=(image("a", 1),))
    later = [1, 7, 7, 2, 3, 7, 7, 5]
    second = answered(tree, later, [6], images=(image("a", 1), image("b", 5)))
    assert (second.parent, second.turn) == (0, 1) and [one.name for one in second.images] == ["b"]
    others = {
        "another one": (image("c", 1), image("b", 5)), "none": (), "one before alone": (image("a", 1),),
        "another place": (image("a", 1, length=1), image("b", 5)),
        "one across the answer's end": (image("a", 1), image("b", 4, length=3)),
    }  # fmt: skip
    found = {why: answered(tree, later, [6], images=of) for why, of in others.items()}
    parents = {why: one.parent for why, one in found.items()}
    assert parents == dict.fromkeys(others) | {"one before alone": 0}
    assert tree.branches == 5 and first.parent is None
    third = answered(tree, [*later, 6, 9], [8], images=(image("a", 1), image("b", 5)))
    assert third.parent == 1 and third.images == ()
    assert [one.name for one in tree.images(len(tree.turns) - 1)] == ["a", "b"]


def test_equal_tokens_with_other_images_have_the_key_of_their_place_in_the_line(tree):
    """Else their tokens would depend on which came first."""
    prompts = [tree.begin([1, 7, 7], (), (image(name, 1),)) for name in "aab"]
    assert [one.turn for one in prompts] == [0, AGAIN, 0]
    tree.begun.clear()
    tree.add([turn_of(prompts[0], [2])])
    assert [tree.begin([1, 7, 7], (), (image(name, 1),)).turn for name in "ab"] == [AGAIN, 0]


def test_a_conversation_is_found_with_the_places_of_its_images(tree):
    answered(tree, [1, 7, 7], [2], images=(image("a", 1),))
    answered(tree, [1, 7, 7, 2, 5, 7, 7], [8], images=(image("a", 1), image("b", 5)), conversation=b"both")
    found = tree.find(b"both")
    assert [(one.offset, one.length) for one in found.spans] == [(1, 2), (5, 2)]
    assert found.token_ids.tolist() == [1, 7, 7, 2, 5, 7, 7, 8]


def test_images_files_are_limited_in_one_line():
    tree = TrajectoryTree(opening(image_bytes=9), "epoch")
    answered(tree, [1, 7, 7], [2], images=(image("a", 1, sent=b"12345"),))
    answered(tree, [1, 7, 7, 2, 3], [4], images=(image("a", 1, sent=b"12345"),))  # kept already
    with pytest.raises(ValueError, match=r"limits\.image_bytes: the trajectory's images have 10 bytes of 9"):
        tree.begin([1, 7, 7, 2, 3, 4, 7, 7], (), (image("a", 1, sent=b"12345"), image("b", 6, sent=b"12345")))


def test_a_row_has_its_images_as_features(tree):
    answered(tree, [1, 7, 7], [2], images=(image("a", 1),))
    answered(tree, [1, 7, 7, 2, 7, 7], [4], images=(image("a", 1), image("b", 4)))
    answered(tree, [5], [6])
    items = {"a": "AAAA", "b": "BBBB"}
    row, text = rows_of(tree, items)
    assert row["features"] == {
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 2}, {"offset": 4, "length": 2}]},
        "kwargs_data": {"image": ["AAAA", "BBBB"]},
    }
    assert "features" not in text and trajectory_body(tree, None, items)["rows"][0] == row


def test_the_book_and_other_gateways_tell_turns_apart_by_their_images(calls):
    async def story():
        one, other = gateway(calls), gateway(calls)
        name, _ = await one.open(Role.EVALUATOR, OpenRequest())
        for picture in ("a", "b", "a"):
            tree = await one.tree(Role.EVALUATOR, name)
            begun = tree.begin([1, 7, 7], (), (image(picture, 1),))
            await one._add(Role.EVALUATOR, tree, turn_of(begun, [2]))
        tree = await other.tree(Role.EVALUATOR, name)
        assert [one.images[0].name for one in tree.turns] == ["a", "b", "a"] and tree.turns[0].images[0].sent == b"file"
        begun = tree.begin([1, 7, 7, 2, 5], (), (image("b", 1),))
        assert begun.parent == 1
        calls.lose()
        await one.tree(Role.EVALUATOR, name)  # gives the new coordinator all that it knows
        await other._add(Role.EVALUATOR, tree, turn_of(begun, [6]))
        found = await one.tree(Role.EVALUATOR, name)
        assert found.turns[3].parent == 1 and found.turns[3].images == () and len(found.turns) == 4

    asyncio.run(story())


# ---- the coordinator's book, and gateways over it ----------------------------------------------------


class Calls:
    """The calls of one role, over a book in this process; it can be lost."""

    def __init__(self):
        self.seconds, self.released, self.rewards, self.called, self.renewed = 0.0, [], [], [], []
        self.lose()

    def lose(self) -> None:
        name = f"epoch-{id(object())}-{self.seconds}"
        self.book = book.Trajectories(name, self.now, self, lambda *reward: self.rewards.append(reward))
        self.seconds += 1.0

    def now(self) -> float:
        return self.seconds

    def end_trajectory(self, *sample) -> None:
        self.released.append(sample)

    def call(self, *called) -> None:
        self.called.append(called)

    def renew(self, session: str) -> bool:
        self.renewed.append(session)
        return True

    async def open(self, *arguments) -> None:
        turns = arguments[2] if len(arguments) > 2 else ()
        assert not isinstance(self.book.open(*arguments[:2], turns), Rejected)

    async def read(self, name, epoch="", known=0):
        return self.book.read(name, epoch, known)

    async def add(self, *arguments):
        return self.book.add(*arguments)

    async def end(self, name, reward):
        return self.book.end(name, reward)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def gateway(calls: Calls) -> GatewayTrajectories:
    return GatewayTrajectories(lambda role: calls)


async def turned(one: GatewayTrajectories, name: str, prompt: list[int], answer: list[int]) -> None:
    tree = await one.tree(Role.EVALUATOR, name)
    await one._add(Role.EVALUATOR, tree, turn_of(tree.begin(prompt, ()), answer))


def test_gateways_go_on_with_each_other_s_turns_and_after_a_lost_coordinator(calls):
    async def story():
        one, other = gateway(calls), gateway(calls)
        name, key = await one.open(Role.EVALUATOR, OpenRequest(group="g", index=2, limits={"turns": 9}))
        await turned(one, name, [1], [2])
        await turned(other, name, [1, 2, 3], [4])
        await turned(one, name, [1, 2, 3, 4, 5], [6])
        calls.lose()
        assert await one.is_key(name, key.encode())
        await turned(one, name, [1, 2, 3, 4, 5, 6, 7], [8])
        tree = await other.tree(Role.EVALUATOR, name)
        assert len(rows_of(tree)) == 1 and tree.context(3).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        ended = await other.end(Role.EVALUATOR, name, 1.0)
        assert len(ended.turns) == 4 and calls.released == [("http-0-0", "g", 2, True)] and not len(calls.book)
        assert calls.rewards == [("k", 0, {2: 1.0})], "the turns' prompt, for the drafts of later epochs"
        for gone in (one, other):
            with pytest.raises(UnknownTrajectory):
                await gone.tree(Role.EVALUATOR, name)
            assert not await gone.is_key(name, key.encode()) and not gone._known

    asyncio.run(story())


def test_a_trajectory_whose_coordinator_is_lost_as_it_ends_has_its_rows(calls):
    """It was answered as one that had ended before, and its rows were lost."""

    async def story():
        one = gateway(calls)
        name, _ = await one.open(Role.EVALUATOR, OpenRequest(group="g", index=2))
        await turned(one, name, [1], [2])
        end, losses = calls.end, 2

        async def ends(*arguments):
            nonlocal losses
            if losses:
                losses -= 1
                calls.lose()
            return await end(*arguments)

        calls.end = ends
        ended = await one.end(Role.EVALUATOR, name, 1.0)
        assert len(rows_of(ended)) == 1 and not losses and not len(calls.book) and not one._known
        assert calls.released == [("http-0-0", "g", 2, True)] and calls.rewards == [("k", 0, {2: 1.0})]
        with pytest.raises(UnknownTrajectory):
            await one.end(Role.EVALUATOR, name, 1.0)

    asyncio.run(story())


def test_a_turn_of_another_gateway_that_is_recorded_as_a_trajectory_ends_is_in_its_rows(calls):
    """It was lost, though its answer had reached the harness."""

    async def story():
        one, other = gateway(calls), gateway(calls)
        name, _ = await one.open(Role.EVALUATOR, OpenRequest())
        await turned(one, name, [1], [2])
        end = calls.end

        async def ends(*arguments):
            await turned(other, name, [1, 2, 3], [4])
            return await end(*arguments)

        calls.end = ends
        ended = await one.end(Role.EVALUATOR, name, 1.0)
        assert [row["token_ids"] for row in rows_of(ended)] == [[1, 2, 3, 4]]

    asyncio.run(story())


def test_a_prompt_again_is_another_sample_while_the_first_one_goes_on_after_a_lost_coordinator(calls):
    """It got the first one's key, and its answer."""

    async def story():
        one = gateway(calls)
        name, _ = await one.open(Role.EVALUATOR, OpenRequest())
        before = await one.tree(Role.EVALUATOR, name)
        first = before.begin([1], ())
        calls.lose()
        after = await one.tree(Role.EVALUATOR, name)
        second = after.begin([1], ())
        assert after is not before and (first.turn, second.turn) == (0, AGAIN)
        for begun, tree in ((first, before), (second, after)):
            await one._add(Role.EVALUATOR, tree, turn_of(begun, [2]))
            tree.begun.discard(begun)
        assert len(after.turns) == 2 and not after.begun

    asyncio.run(story())


def test_a_turn_in_flight_finds_its_place_in_a_tree_that_lacks_its_parent(calls):
    async def story():
        one, other = gateway(calls), gateway(calls)
        name, _ = await one.open(Role.EVALUATOR, OpenRequest())
        await turned(one, name, [1], [2])
        await other.tree(Role.EVALUATOR, name)
        await turned(one, name, [1, 2, 3], [4])
        tree = await one.tree(Role.EVALUATOR, name)
        begun = tree.begin([1, 2, 3, 4, 5], ())
        calls.lose()
        await other.tree(Role.EVALUATOR, name)  # gives the new coordinator what it knows: one turn
        await one._add(Role.EVALUATOR, tree, turn_of(begun, [6]))
        found = await other.tree(Role.EVALUATOR, name)
        assert found.line(1) == [0, 1] and list(found.turns[1].prompt_token_ids) == [3, 4, 5]
        await other.end(Role.EVALUATOR, name, None)
        with pytest.raises(UnknownTrajectory):
            await one._add(Role.EVALUATOR, tree, turn_of(begun, [6]))

    asyncio.run(story())


def test_a_turn_is_recorded_once_however_often_it_is_sent(calls):
    tree = TrajectoryTree(opening(), "epoch")
    turn, name = turn_of(tree.begin([1], ()), [2]), opening().trajectory_id
    epoch = calls.book.read(name, "", 0).epoch
    assert calls.book.add(name, epoch, turn) is None
    calls.book.open(opening(), 5.0, ())
    calls.book.open(opening(), 9.0, (turn, turn))  # it is open
    assert [calls.book.add(name, epoch, turn) for _ in range(2)] == [0, 0]
    assert calls.book.add(name, "another", turn) is None
    state = calls.book.read(name, "", 7)
    assert len(state.turns) == 1 and state.left_s == 5.0
    assert calls.book.read(name, state.epoch, 1).turns == ()
    calls.seconds += 5.0
    assert calls.book.read(name, state.epoch, 0).opening is None
    calls.book.sweep()
    assert not len(calls.book) and calls.released == [("http-0-0", "g", 3, True)]


def test_the_number_of_trajectories_is_limited(calls, monkeypatch):
    monkeypatch.setattr(book, "MAX_TRAJECTORIES", 1)
    assert calls.book.open(opening(), 5.0, ()) is None
    refused = calls.book.open(opening("b" * 32), 5.0, ())
    assert refused.reason == "1 trajectories are open; end some"


@pytest.mark.parametrize(
    "body",
    [
        {"group": ""}, {"index": -1}, {"limits": {"turns": 0}}, {"limits": {"days": 1}}, {"unknown": 1},
        {"sampling": {"temperature": -1.0}}, {"sampling": {"seed": 1}}, {"sampling": {"structured_outputs": {}}},
    ],
)  # fmt: skip
def test_a_bad_opening_is_refused(body):
    with pytest.raises(ValidationError):
        OpenRequest(**body)


def status_of(path: str, headers: dict[str, str], tokens_file: str | None, is_key) -> tuple[int, Role | None]:
    """Status of a request that every route answers, and the role that it comes with."""
    found = []

    async def app(scope, receive, send) -> None:
        found.append(scope["role"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            found.insert(0, message["status"])

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    asyncio.run(AccessControl(app, GatewayConfig(tokens_file=tokens_file), is_key)(scope, None, send))
    return (found[0], found[1] if len(found) > 1 else None)


def test_a_key_opens_its_trajectory_alone_and_a_role_s_token_every_one(tmp_path):
    async def is_key(name: str, given: bytes) -> bool:
        return (name, given) == ("mine", b"the-key")

    file = tmp_path / "tokens"
    file.write_text(f"trainer {'t' * 16}\n")
    key, token = {"authorization": "Bearer the-key"}, {"authorization": f"Bearer {'t' * 16}"}
    for tokens_file in (None, str(file)):
        for headers in (key, {"x-api-key": "the-key"}):
            assert status_of("/v1/trajectories/mine", headers, tokens_file, is_key) == (200, Role.EVALUATOR)
            assert status_of("/v1/trajectories/mine/v1/messages", headers, tokens_file, is_key)[0] == 200
            assert status_of("/v1/trajectories/theirs/messages", headers, tokens_file, is_key)[0] == 401
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer "}):
            assert status_of("/v1/trajectories/mine", headers, tokens_file, is_key)[0] == 401
    assert status_of("/v1/trajectories/theirs", token, str(file), is_key) == (200, Role.TRAINER)
    for path in ("/v1/trajectories", "/v1/completions", "/update_weights"):
        assert status_of(path, key, str(file), is_key)[0] == 401
    assert status_of("/v1/trajectories", {}, None, is_key) == (200, Role.EVALUATOR)


def test_ids_from_paths_are_checked_before_anything_is_asked():
    one = GatewayTrajectories(lambda role: SimpleNamespace())
    for name in ("", "..", "A" * 32, "a" * 31, "a" * 33, "a" * 31 + "\n"):
        assert not asyncio.run(one.is_key(name, b"key"))


def test_the_tool_that_a_turn_calls_is_told_and_an_open_trajectory_keeps_its_session(calls):
    async def story():
        one = gateway(calls)
        name, _ = await one.open(Role.EVALUATOR, OpenRequest(group="g", index=2, seed=5))
        tree = await one.tree(Role.EVALUATOR, name)
        for tool in ("", "grep"):
            await one._add(Role.EVALUATOR, tree, turn_of(tree.begin([1], ()), [2]).model_copy(update={"tool": tool}))
        turn = tree.turns[1].turn
        assert calls.called == [("http-5-0", ("g", 2, turn), "grep")]
        calls.book.sweep()
        await one.end(Role.EVALUATOR, name, None)
        calls.book.sweep()
        assert calls.renewed == ["http-5-0"]

    asyncio.run(story())
