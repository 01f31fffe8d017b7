"""`tailrace.http.Client` against a gateway: the tokens of `RolloutClient`, also over connections that break."""

import asyncio
import contextlib
import socket
import threading

import pytest
from gateway_service import TOKENS

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, SamplingParams
from tailrace.http import Client

GROUPS = (
    PromptGroup(prompt_id="ids", token_ids=(5, 300, 7, 41), samples=5, max_tokens=90),
    PromptGroup(prompt_id="text é", text="Once upon a time", samples=3, max_tokens=40),
    PromptGroup(
        prompt_id="chat",
        messages=({"role": "user", "content": "Hello"},),
        samples=3,
        max_tokens=40,
        sampling=SamplingParams(temperature=0.7, top_k=50, logit_bias={300: 2.0}, stop=("zebra",)),
    ),
)


class CutWire:
    """A relay to a gateway that closes its first connections once a request has passed, `cuts` of them."""

    def __init__(self, port: int, cuts: int):
        self._port, self.left = port, cuts
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            cut, self.left = self.left > 0, self.left - 1
            threading.Thread(target=self._pass, args=(near, far, cut), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, cut: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                if cut:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def light(address):
    client = Client(address[0], TOKENS["trainer"])
    yield client
    client.close()


def of(groups) -> dict:
    """All that both clients give, but for logprobs."""
    return {group.prompt_id: (group.prompt_token_ids, [facts(one) for one in group.samples]) for group in groups}


def facts(one) -> tuple:
    return one.sample_index, one.token_ids, one.text, one.finish_reason, {part.weights_digest for part in one.segments}


def logprobs_of(groups) -> list[float]:
    found = {(group.prompt_id, one.sample_index): one.logprobs for group in groups for one in group.samples}
    return [value for key in sorted(found) for value in found[key]]


def test_a_batch_has_the_tokens_and_logprobs_of_rollout_client(address, light):
    batch = RolloutBatch(batch_id="light", groups=GROUPS, seed=11, step=2)
    expected = list(address[1].rollout_blocking(batch))
    found = list(light.rollout_blocking(batch))
    assert of(found) == of(expected)
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-4)
    assert {group.step for group in found} == {2} and {group.batch_id for group in found} == {"light"}


def test_connections_that_break_change_no_token(address, light):
    batch = RolloutBatch(batch_id="cut", groups=GROUPS, seed=11, step=2)
    expected = of(light.rollout_blocking(batch))
    wire = CutWire(int(address[0].rpartition(":")[2]), cuts=5)
    cut = Client(wire.url, TOKENS["evaluator"])
    assert of(cut.rollout_blocking(batch)) == expected
    assert wire.left < 0
    cut.close()
    wire.close()


def test_single_samples_are_those_of_the_batch_and_weights_are_the_service_s(address, light):
    (whole,) = address[1].rollout_blocking(RolloutBatch(batch_id="s", groups=GROUPS[:1], seed=4))

    async def story():
        async with light.open(seed=4) as session:
            for index in reversed(range(5)):
                session.submit(GROUPS[0].token_ids, group="ids", index=index, max_tokens=90)
            return [answer async for answer in session.samples()]

    answers = {answer.sample.sample_index: answer.sample.token_ids for answer in asyncio.run(story())}
    assert answers == {one.sample_index: one.token_ids for one in whole.samples}
    status, info = address[1].status_blocking(), light.server_info_blocking()
    assert (info.model, info.weights_version, info.replicas) == (status.model, status.weights_version, 2)
    assert light.weight_info_blocking().digest == status.weights_digest
    assert light.detokenize_blocking(light.tokenize_blocking("A word", add_special_tokens=False)) == "A word"
