"""Roles at the ingress: what each may do, and that a refusal is one line and has done nothing."""

import ast
import asyncio
from functools import partial
from pathlib import Path

import pytest

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import PoliciesRejected
from tailrace.deployments.messages.roles import Passed, Role, admits
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RejectedBy, RolloutBatch
from tailrace.policies.families.registry import Policies

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
COORDINATOR = DEPLOYMENTS / "coordinator" / "coordinator.py", DEPLOYMENTS / "feed" / "watch_calls.py"
RIGHTS = {
    Role.OBSERVER: {"status", "replica_changes", "watch", "sample_log", "batch_log"},
    Role.EVALUATOR: {
        "rollout", "renew", "take_spans", "generate", "cancel_samples", "renew_session", "close_session",
        "stream_sample", "sample_detail", "model_folder", "tokenizer_files", "open_trajectory", "read_trajectory",
        "add_turn", "end_trajectory",
    },
    Role.TRAINER: {
        "reserve", "cancel", "update_weights", "publish_weights", "transfer_weights", "load_adapter", "unload_adapter",
        "set_policies",
        "journal", "renew_journal", "record_rewards", "forget_history", "inspect_group", "pool_detail", "drain_pool",
        "reset_caches", "pause", "resume", "cancel_all", "sleep", "wake_up", "read_weights",
    },
}  # fmt: skip
SERVES_OWN = {"reconfigure", "record_autoscaling_stats", "ended_loops", "check_health"}
"""Called by Serve and by the coordinator itself; no call of a driver's client."""


def public_methods() -> dict[str, list[str]]:
    """The coordinator's and its base's, with their guards as text. Read from source: a pure test loads no Ray."""
    trees = [ast.parse(path.read_text()) for path in COORDINATOR]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [one.name for one in classes] == ["Coordinator", "WatchCalls"]
    found = {}
    for node in (node for one in classes for node in one.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = list(map(ast.unparse, node.decorator_list))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            assert ast.unparse(node.value.func) == "Passed"
            found[node.targets[0].id] = [f"admits({ast.unparse(node.value.args[0])})"]
    return {name: guards for name, guards in found.items() if name[0] != "_"}


def test_every_call_of_the_coordinator_names_the_role_it_needs():
    needed = {name: [f"admits(Role.{role.name})"] for role, names in RIGHTS.items() for name in names}
    assert public_methods() == needed | {name: [] for name in SERVES_OWN}


def not_admitted(reason: str) -> Rejected:
    return Rejected(reason=reason, by=RejectedBy.ROLE)


class Ingress:
    """Two guarded calls, and their log."""

    def __init__(self):
        self.done = []
        self.closed = False

    @admits(Role.TRAINER)
    async def write(self, value: int) -> int:
        self.done.append(value)
        return value

    @admits(Role.EVALUATOR)
    async def read(self, items: int):
        try:
            for item in range(items):
                self.done.append(item)
                yield item
        finally:
            self.closed = True

    def put(self, value: int) -> int:
        self.done.append(value)
        return value

    passed_write = Passed(Role.TRAINER, lambda me: partial(me.write, Role.TRAINER))
    passed_put = Passed(Role.TRAINER, lambda me: me.put)
    passed_read = Passed(Role.EVALUATOR, lambda me: partial(me.read, Role.TRAINER), is_stream=True)


async def all_of(opening) -> list:
    return [item async for item in await opening]


@pytest.mark.parametrize("name", ["write", "passed_write", "passed_put"])
@pytest.mark.parametrize("role", list(Role))
def test_a_call_is_done_only_if_the_role_includes_it(role, name):
    ingress = Ingress()
    answer = asyncio.run(getattr(ingress, name)(role, 3))
    if role is Role.TRAINER:
        assert answer == 3 and ingress.done == [3]
    else:
        assert answer == not_admitted(f"{name} needs role trainer, and this client is {role.value}")
        assert ingress.done == []


@pytest.mark.parametrize("name", ["read", "passed_read"])
@pytest.mark.parametrize("role", list(Role))
def test_a_stream_yields_its_items_or_the_refusal_alone(role, name):
    ingress = Ingress()
    items = asyncio.run(all_of(getattr(ingress, name)(role, 2)))
    if role is Role.OBSERVER:
        assert items == [not_admitted(f"{name} needs role evaluator, and this client is observer")] and not ingress.done
    else:
        assert items == [0, 1] and ingress.closed


@pytest.mark.parametrize("name", ["read", "passed_read"])
def test_closing_a_guarded_stream_closes_the_one_inside(name):
    async def leave(ingress: Ingress) -> None:
        items = await getattr(ingress, name)(Role.TRAINER, 10)
        assert await anext(items) == 0
        await items.aclose()
        assert ingress.closed

    asyncio.run(leave(Ingress()))


def test_a_role_is_one_of_three():
    with pytest.raises(ValueError, match="'admin' is not a valid Role"):
        RolloutClient(handle=Handle({}), role="admin")
    with pytest.raises(ValueError, match="'admin' is not a valid Role"):
        asyncio.run(Ingress().write("admin", 1))


class Handle:
    """The coordinator's handle with scripted answers by method; `calls` are the arguments of each call."""

    def __init__(self, answers: dict):
        self.answers, self.calls = answers, []

    def options(self, stream: bool) -> "Handle":
        return Streams(self)

    def __getattr__(self, name: str):
        return Remote(self, name)


class Remote:
    def __init__(self, handle: Handle, name: str):
        self._handle, self._name = handle, name

    async def remote(self, *arguments):
        self._handle.calls.append((self._name, *arguments))
        return self._handle.answers.get(self._name)


class Streams:
    def __init__(self, handle: Handle):
        self._handle = handle

    def __getattr__(self, name: str):
        return StreamRemote(self._handle, name)


class StreamRemote:
    def __init__(self, handle: Handle, name: str):
        self._handle, self._name = handle, name

    def remote(self, *arguments):
        self._handle.calls.append((self._name, *arguments))
        return Items(self._handle.answers[self._name])


class Items:
    def __init__(self, items: list):
        self._items = iter(items)

    def __aiter__(self):
        return self

    async def __anext__(self):
        for item in self._items:
            return item
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


def test_a_refusal_is_a_permission_error_of_one_line(monkeypatch):
    monkeypatch.setattr("tailrace.app.calls.resume.lost_service", lambda: (ConnectionError,))  # without Ray's own
    refused = not_admitted("cancel needs role trainer, and this client is observer")
    client = RolloutClient(handle=Handle({"cancel": refused, "rollout": [refused], "replica_changes": [refused]}),
                           role="observer")  # fmt: skip
    with pytest.raises(PermissionError, match=f"^{refused.reason}$"):
        client.cancel_blocking("b")
    with pytest.raises(PermissionError, match=f"^{refused.reason}$"):
        list(client.replica_changes_blocking())
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", text="x", samples=1, max_tokens=1),))
    with pytest.raises(PermissionError, match=f"^{refused.reason}$"):
        list(client.rollout_blocking(batch))


def test_the_client_names_its_role_in_every_call():
    handle = Handle({"status": 1, "replica_changes": []})
    client = RolloutClient(handle=handle, role="evaluator")
    client.status_blocking()
    list(client.replica_changes_blocking())
    assert handle.calls == [("status", Role.EVALUATOR, 0), ("replica_changes", Role.EVALUATOR)]
    handle.calls.clear()
    RolloutClient(handle=handle).status_blocking()
    assert handle.calls == [("status", Role.TRAINER, 0)], "the default"


def test_policies_travel_as_data_and_a_refusal_is_one_line():
    handle = Handle({})
    policies = Policies(ordering="user_policies:LastComeFirst")
    RolloutClient(handle=handle).set_policies_blocking(policies)
    ((_, _, sent),) = handle.calls
    assert sent == policies.model_dump(mode="json") and Policies(**sent) == policies
    handle.answers["set_policies"] = Rejected(reason="ordering 'x:Y': code of package 'x' is not allowed")
    with pytest.raises(PoliciesRejected, match=r"^ordering 'x:Y': code of package 'x' is not allowed$"):
        RolloutClient(handle=handle).set_policies_blocking(policies)


class Beats:
    """A heartbeat that beats when it is told to."""

    def __init__(self, beat):
        self.beat, self.stopped = beat, False
        BEATS.append(self)

    def stop(self) -> None:
        self.stopped = True


BEATS: list[Beats] = []


def test_a_client_that_wants_a_journal_gives_signs_of_life_until_it_takes_it(monkeypatch):
    monkeypatch.setattr("tailrace.app.calls.resume.lost_service", lambda: (ConnectionError,))  # without Ray's own
    BEATS.clear()
    handle = Handle({})
    client = RolloutClient(handle=handle, heartbeat=Beats)
    client.journal_blocking(True)
    (beat,) = BEATS
    asyncio.run(beat.beat())
    assert handle.calls == [("journal", Role.TRAINER, True), ("renew_journal", Role.TRAINER)] and not beat.stopped
    client.journal_blocking(True)
    assert [one.stopped for one in BEATS] == [True, False]
    client.journal_blocking(False)
    assert [one.stopped for one in BEATS] == [True, True]
