"""One reader a batch; a lost stream is continued; a silent driver's batch is cancelled."""

import asyncio

import pytest

from tailrace.deployments.batches.deliveries import Deliveries
from tailrace.deployments.batches.quotas import BatchLoad, Quotas
from tailrace.deployments.messages.delivery import result_bytes
from tailrace.deployments.messages.liveness import LEASE_S, SILENT_S
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, Rejected, RejectedBy, RolloutBatch


def batch(*prompt_ids: str, seed: int = 0) -> RolloutBatch:
    groups = tuple(PromptGroup(prompt_id=name, token_ids=(1,)) for name in prompt_ids)
    return RolloutBatch(batch_id="b", groups=groups, seed=seed)


def result(prompt_id: str) -> GroupResult:
    return GroupResult(batch_id="b", prompt_id=prompt_id, prompt_token_ids=(1,), samples=())


class Desk:
    """Deliveries over a core that notes submissions and cancels; `now` is moved by hand."""

    def __init__(self):
        self.submitted: list[list[str]] = []
        self.cancelled = 0
        self.now = 0.0
        self.refused: Rejected | None = None
        self.delivery = None
        self.deliveries = Deliveries(self._submit, self._cancel, self._refusal, lambda: self.now)

    async def _submit(self, message, delivery, cancels=0):
        self.submitted.append([group.prompt_id for group in message.groups])
        self.delivery = delivery
        return self.refused

    def _cancel(self, delivery):
        self.cancelled += 1

    async def _refusal(self, message):
        return self.refused

    def read(self, message, driver="d", have=()):
        return self.deliveries.read(message, driver, have)


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(Desk()), 60.0))


def test_groups_come_once_each_and_the_batch_is_forgotten():
    async def scenario(desk):
        stream = desk.read(batch("p", "q"))
        first = asyncio.ensure_future(anext(stream))
        await settled()
        for name in ("q", "p"):
            desk.delivery.put(result(name))
        assert [(await first).prompt_id] + [item.prompt_id async for item in stream] == ["q", "p"]
        assert len(desk.deliveries) == 0 and desk.submitted == [["p", "q"]]

    run(scenario)


def test_a_lost_stream_is_continued_and_only_missing_groups_are_submitted_again():
    async def scenario(desk):
        old = desk.read(batch("p", "q", "r"))
        first = asyncio.ensure_future(anext(old))
        await settled()
        desk.delivery.put(result("p"))
        assert (await first).prompt_id == "p"  # it never reaches the driver
        waiting = asyncio.ensure_future(anext(old))
        await settled()
        new = desk.read(batch("p", "q", "r"))
        second = asyncio.ensure_future(anext(new))
        ended = await waiting
        assert isinstance(ended, Rejected) and ended.by is RejectedBy.READER
        for name in ("q", "p", "r"):
            desk.delivery.put(result(name))
        assert [(await second).prompt_id] + [item.prompt_id async for item in new] == ["q", "p", "r"]
        assert desk.submitted == [["p", "q", "r"], ["p"]] and len(desk.deliveries) == 0

    run(scenario)


def test_another_driver_waits_until_the_first_is_silent():
    async def scenario(desk):
        first = asyncio.ensure_future(anext(desk.read(batch("p"), "one")))
        await settled()
        refused = await anext(desk.read(batch("p"), "two"))
        assert refused.by is RejectedBy.READER and "running already" in refused.reason
        desk.now = SILENT_S
        second = asyncio.ensure_future(anext(desk.read(batch("p"), "two")))
        assert (await first).by is RejectedBy.READER
        desk.delivery.put(result("p"))
        assert (await second).prompt_id == "p"

    run(scenario)


@pytest.mark.parametrize("other", [batch("p", seed=1), RolloutBatch(
    batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(2,)),)
)])  # fmt: skip
def test_other_prompts_or_settings_are_another_batch(other):
    async def scenario(desk):
        reading = asyncio.ensure_future(anext(desk.read(batch("p"))))
        await settled()
        refused = await anext(desk.read(other))
        assert refused.by is RejectedBy.CONTENT and "other prompts or settings" in refused.reason
        reading.cancel()

    run(scenario)


def test_a_closed_stream_cancels_and_so_does_silence():
    async def scenario(desk):
        stream = desk.read(batch("p", "q"))
        first = asyncio.ensure_future(anext(stream))
        await settled()
        desk.delivery.put(result("p"))
        await first
        await stream.aclose()
        assert desk.cancelled == 1 and len(desk.deliveries) == 0

        waiting = asyncio.ensure_future(anext(desk.read(batch("p"))))
        await settled()
        desk.now = LEASE_S
        desk.deliveries.renew("b", "d")
        desk.now = 2 * LEASE_S
        assert desk.deliveries.expire() == 0, "it has renewed"
        desk.deliveries.renew("b", "somebody else")
        desk.now += 1.0
        assert desk.deliveries.expire() == 1
        assert (await waiting).by is RejectedBy.READER and desk.cancelled == 2

    run(scenario)


def test_a_refused_batch_leaves_nothing():
    async def scenario(desk):
        desk.refused = Rejected(reason="no")
        assert [item.reason async for item in desk.read(batch("p"))] == ["no"]
        assert len(desk.deliveries) == 0

    run(scenario)


def test_groups_beyond_the_window_are_held_until_the_driver_acknowledges():
    async def scenario(desk):
        desk.deliveries.window_bytes = 1
        stream = desk.read(batch("p", "q", "r"))
        first = asyncio.ensure_future(anext(stream))
        await settled()
        for name in ("p", "q", "r"):
            desk.delivery.put(result(name))
        size = result_bytes(result("p"))
        assert (await first).prompt_id == "p"
        second = asyncio.ensure_future(anext(stream))
        await settled()
        assert not second.done() and desk.deliveries.held_bytes() == {"b": 3 * size}
        for driver, taken in (("d", 0), ("stranger", 1)):
            desk.deliveries.renew("b", driver, taken)
            await settled()
            assert not second.done()
        desk.deliveries.renew("b", "d", 1)
        assert (await second).prompt_id == "q" and desk.deliveries.held_bytes() == {"b": 2 * size}
        new = desk.read(batch("p", "q", "r"), have=("p", "q"))  # the stream was lost
        assert (await anext(new)).prompt_id == "r" and desk.deliveries.held_bytes() == {"b": size}
        desk.deliveries.renew("b", "d", 2)  # a late one, of the first stream
        assert desk.deliveries.held_bytes() == {"b": size}
        desk.deliveries.renew("b", "d", 3)
        assert desk.deliveries.held_bytes() == {}

    run(scenario)


def test_a_submission_outlives_the_stream_that_began_it():
    """It may wait for hours; the driver's next stream gets its groups, or the reason why there are none."""

    async def scenario(desk):
        gate, submit = asyncio.Event(), desk._submit

        async def waits(message, delivery, cancels):
            await gate.wait()
            return await submit(message, delivery)

        desk.deliveries._submit = waits
        old = asyncio.ensure_future(anext(desk.read(batch("p"))))
        await settled()
        new = asyncio.ensure_future(anext(desk.read(batch("p"))))
        await settled()
        old.cancel()
        await settled()
        desk.refused = Rejected(reason="not now")
        gate.set()
        assert (await new).reason == "not now" and desk.submitted == [["p"]]

    run(scenario)


def test_a_cancel_ends_the_submissions_before_it_and_none_after_it():
    """Also those that are not in the core yet: their prompts are encoded, or they wait to be admitted."""

    async def scenario(desk):
        gate, ended = asyncio.Event(), {}

        async def waits(message, delivery, cancels):
            await gate.wait()
            ended[message.groups[0].prompt_id] = delivery.cancels != cancels

        desk.deliveries._submit = waits
        assert not desk.deliveries.cancel("b"), "it is unknown"
        streams = [asyncio.ensure_future(anext(desk.read(batch("p"))))]
        await asyncio.sleep(0)
        assert desk.deliveries.cancel("b") and desk.cancelled == 1
        for prompt_ids in (("p", "q"), ("p", "q", "r")):
            streams.append(asyncio.ensure_future(anext(desk.read(batch(*prompt_ids)))))
            await settled()
            if prompt_ids[-1] == "q":
                desk.deliveries.cancel_all()
        gate.set()
        await settled()
        assert ended == {"p": True, "q": True, "r": False}
        for stream in streams:
            stream.cancel()

    run(scenario)


def test_missing_groups_of_a_cancelled_batch_are_ended_when_its_next_stream_submits_them():
    async def scenario(desk):
        ended = []

        async def submit(message, delivery, cancels):
            ended.append(delivery.cancels != cancels)

        desk.deliveries._submit = submit
        for cancelled in (False, True):
            stream = asyncio.ensure_future(anext(desk.deliveries.read(batch("p"), "d", (), cancelled)))
            await settled()
            stream.cancel()
            await settled()
        assert ended == [False, True]

    run(scenario)


def test_a_new_reader_has_a_whole_lease():
    async def scenario(desk):
        first = asyncio.ensure_future(anext(desk.read(batch("p"))))
        await settled()
        desk.now = LEASE_S - 1.0
        second = asyncio.ensure_future(anext(desk.read(batch("p"))))
        await settled()
        assert (await first).by is RejectedBy.READER
        desk.now = 2 * LEASE_S - 2.0
        assert desk.deliveries.expire() == 0 and desk.cancelled == 0
        desk.now = 2 * LEASE_S
        assert desk.deliveries.expire() == 1 and (await second).by is RejectedBy.READER

    run(scenario)


def test_groups_of_a_refused_submission_are_submitted_again():
    async def scenario(desk):
        submit, refused = desk._submit, Rejected(reason="not now")

        async def once(message, delivery, cancels):
            await submit(message, delivery)
            return refused if len(desk.submitted) == 2 else None

        desk.deliveries._submit = once
        first = desk.read(batch("p"))
        waiting = asyncio.ensure_future(anext(first))
        await settled()
        assert (await anext(desk.read(batch("p", "q")))).reason == "not now"
        assert (await waiting).by is RejectedBy.READER
        last = asyncio.ensure_future(anext(desk.read(batch("p", "q"))))
        await settled()
        assert desk.submitted == [["p"], ["q"], ["q"]]
        last.cancel()

    run(scenario)


def test_a_batch_that_grows_does_not_count_itself():
    async def scenario(desk):
        desk.deliveries.quotas = Quotas(max_samples=2 * batch("p").groups[0].samples)
        first = asyncio.ensure_future(anext(desk.read(batch("p"))))
        await settled()
        second = asyncio.ensure_future(anext(desk.read(batch("p", "q"))))
        await settled()
        assert desk.submitted == [["p"], ["q"]] and not second.done()
        assert (await anext(desk.read(batch("p", "q", "r")))).by is RejectedBy.SIZE
        for task in (first, second):
            task.cancel()

    run(scenario)


def test_quotas_refuse_at_once_and_name_the_batch_to_wait_for():
    async def scenario(desk):
        desk.deliveries.quotas = Quotas(max_samples=20, max_tokens=8 * 256 + 100, max_result_bytes=1)

        def refusal(samples: int, max_tokens: int):
            group = PromptGroup(prompt_id="p", token_ids=(1,), samples=samples, max_tokens=max_tokens)
            return anext(desk.read(RolloutBatch(batch_id="c", groups=(group,))))

        refused = await refusal(21, 1)
        assert refused.by is RejectedBy.SIZE and "has 21 samples, quotas.max_samples is 20; ask" in refused.reason
        stream = desk.read(batch("p"))
        first = asyncio.ensure_future(anext(stream))
        await settled()
        full = await refusal(13, 1)
        assert full.by is RejectedBy.QUOTA and full.reason.endswith("try again when batch 'b' has ended")
        assert "has 102 tokens, those in flight have 2048, quotas.max_tokens is 2148" in (await refusal(2, 51)).reason
        desk.delivery.put(GroupResult(batch_id="b", prompt_id="p", prompt_token_ids=(1,), samples=()))
        assert (await first).prompt_id == "p"
        assert "when the driver of batch 'b' has read its groups" in (await refusal(1, 1)).reason
        await stream.aclose()
        assert desk.submitted == [["p"]] and len(desk.deliveries) == 0

    run(scenario)


def test_a_session_with_the_name_of_a_batch_does_not_hide_its_load():
    async def scenario(desk: Desk):
        desk.deliveries.quotas = Quotas(max_samples=10)
        desk.deliveries.session_loads = lambda: {"b": BatchLoad(1, 4)}
        reading = asyncio.ensure_future(anext(desk.read(batch("p"))))  # 8 samples
        await settled()
        one = desk.deliveries.quota_refusal("a sample", BatchLoad(1, 4), BatchLoad(1, 4))
        two = desk.deliveries.quota_refusal("two samples", BatchLoad(2, 8), BatchLoad(2, 8))
        assert one is None and "those in flight have 9" in two.reason
        reading.cancel()

    run(scenario)
