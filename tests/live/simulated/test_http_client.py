"""The HTTP client over real sockets, to a gateway of the simulated cluster: what both carry is equal to the bit."""

import asyncio
import os
import pickle
import signal
import socket
import threading
from dataclasses import replace
from random import Random

import pytest
import uvicorn
from waiting import until

from tailrace.app.gateway import service
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.routes import make_app
from tailrace.deployments.messages.delivery import WINDOW_BYTES
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.http import Client
from tailrace.lab.fuzz import cluster
from tailrace.lab.fuzz.cluster import SimulatedCluster, SimulatedPrompts
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.log_disk import LogDisk
from tailrace.lab.fuzz.run import plan_of
from tailrace.lab.verification.over_http import over_http

GROUPS = tuple(PromptGroup(prompt_id=f"é{n}", token_ids=(n + 1, 2), samples=4, max_tokens=90) for n in range(6))
BATCH = RolloutBatch(batch_id="b", groups=GROUPS, seed=3, step=2)


class Served:
    """A cluster and its gateway on an event loop and a thread of their own. `expected`: the batch by Ray's way.

    `cuts`: connections still to be closed by the server, each as its answer is due.
    """

    def __init__(self, folder):
        self._folder, self.cuts, self.expected, self.server = folder, 0, None, None
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        until(lambda: self.server is not None and self.server.started)

    def _serve(self) -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(self._run())
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        # not `asyncio.run`, which waits without a limit: the end of a call may ask a coordinator that has ended
        loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
        loop.close()

    async def _run(self) -> None:
        sizes = {"replicas": 2, "mean_tokens": 60, "step_tokens": 4, "step_s": 0.01, "window_bytes": WINDOW_BYTES}
        size = replace(plan_of(0).size, limits=None, policies={}, **sizes)
        simulated = SimulatedCluster(size, Random(0), LogDisk("sound", self._folder, Random(0)))
        simulated.disk.folders["/poet"] = "poet"
        self.expected = facts([group async for group in driver_client(simulated).rollout(BATCH)])
        gateway = service.GatewayService(lambda role: driver_client(simulated), GatewayConfig())
        app = make_app(gateway, GatewayConfig())
        config = uvicorn.Config(self._cutting(app), log_level="critical")
        self.server = uvicorn.Server(config)
        await self.server.serve(sockets=[self._socket])

    def _cutting(self, app):
        async def cut(scope, receive, send) -> None:
            async def broken(message) -> None:
                if self.cuts > 0 and message["type"] == "http.response.body":
                    self.cuts -= 1
                    raise ConnectionError("cut")
                await send(message)

            await app(scope, receive, broken)

        return cut

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join()


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "Prompts", lambda *_: SimulatedPrompts())
    monkeypatch.setattr(cluster, "BOOT_S", (0.0, 0.1))  # of the wall clock here
    found = Served(tmp_path)
    yield found
    found.close()


def facts(groups) -> dict:
    return {
        group.prompt_id: [
            (group.prompt_token_ids, one.sample_index, one.token_ids, one.logprobs, one.text, one.finish_reason)
            for one in group.samples
        ]
        for group in groups
    }


def test_a_batch_is_equal_to_the_bit_also_over_answers_that_are_cut(served):
    client = Client(served.url)
    assert facts(client.rollout_blocking(BATCH)) == served.expected
    served.cuts = 4
    assert facts(client.rollout_blocking(BATCH)) == served.expected
    assert served.cuts == 0
    client.close()


def test_groups_of_an_adapter_and_of_the_model_alone_come_in_one_batch(served):
    client = Client(served.url)
    loaded = client.load_adapter_blocking("poet", "/poet")
    assert client.adapters_blocking() == (loaded,)
    groups = [group.model_copy(update={"adapter": (None, "poet")[n % 2]}) for n, group in enumerate(GROUPS)]
    results = list(client.rollout_blocking(BATCH.model_copy(update={"groups": tuple(groups)})))
    found = facts(results)
    for group in groups:
        assert (found[group.prompt_id] == served.expected[group.prompt_id]) == (group.adapter is None)
    digests = {part.adapter_digest for group in results for one in group.samples for part in one.segments}
    assert digests == {"", loaded.digest}
    client.close()


def test_three_clients_at_once_have_the_tokens_of_the_batch(served):
    served.cuts = 2
    groups, note = asyncio.run(over_http(served.url, 3, BATCH))
    assert facts(groups) == served.expected and served.cuts == 0
    counts = [int(word) for word in note.partition("made ")[2].removesuffix(" requests").split(", ")]
    assert len(counts) == 3 and min(counts) > 1 and sum(counts) == 24


def test_a_client_that_asked_for_nothing_is_no_proof(served):
    one = BATCH.model_copy(update={"groups": (GROUPS[0].model_copy(update={"samples": 1}),)})
    assert asyncio.run(over_http(served.url, 3, one))[1] == ""


def in_child(work) -> str:
    """The text that a forked process writes, within two minutes."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(120)
        try:
            os.write(writes, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_a_client_works_in_a_forked_process_and_after_a_pickle(served):
    client = Client(served.url)
    expected = str(client.weight_info_blocking())
    begun = client.rollout_blocking(BATCH)
    next(begun)

    def continued() -> str:
        try:
            return str(next(begun))
        except RuntimeError as error:
            return str(error)

    assert in_child(client.weight_info_blocking) == expected
    assert in_child(lambda: in_child(client.weight_info_blocking)) == expected
    assert "make one here" in in_child(continued)
    assert facts(client.rollout_blocking(BATCH)) == served.expected, "the parent's connections are as they were"
    assert len(list(begun)) == len(GROUPS) - 1
    copy = pickle.loads(pickle.dumps(client))
    client.close()
    assert str(copy.weight_info_blocking()) == expected
    copy.close()


def test_a_bound_beyond_the_context_is_cut_as_by_ray(served):
    client = Client(served.url)
    groups = (GROUPS[0].model_copy(update={"max_tokens": 10**6, "samples": 2}),)
    (group,) = client.rollout_blocking(BATCH.model_copy(update={"groups": groups}))
    assert all(len(sample.token_ids) <= 512 - 2 for sample in group.samples)
    client.close()
