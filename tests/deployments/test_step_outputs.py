"""Outputs of an engine's steps: which of them pass through vLLM's processor. The engine stands in for vLLM's."""

import time
from collections import deque
from types import SimpleNamespace

from tailrace.deployments.engine.step_outputs import StepOutput, StepOutputs
from tailrace.deployments.engine.step_pace import StepPace


class Processor:
    """Keeps the books that vLLM's does, of requests that are named after their ids."""

    def __init__(self):
        self.request_states = {}
        self.seen: list[str] = []

    def add(self, request_id: str) -> None:
        self.request_states[request_id] = SimpleNamespace(external_req_id=request_id[0], is_prefilling=True)

    def process_outputs(self, outputs, engine_core_timestamp=None, iteration_stats=None, weight_version=None):
        found = []
        for output in outputs:
            self.seen.append(output.request_id)
            if (state := self.request_states.get(output.request_id)) is None:
                continue
            state.is_prefilling = False
            ended = output.finish_reason is not None
            if ended:
                del self.request_states[output.request_id]
            made = SimpleNamespace(token_ids=output.new_token_ids, finish_reason=output.finish_reason)
            found.append(SimpleNamespace(request_id=state.external_req_id, outputs=[made], finished=ended))
        return found


class Engine:
    """Gives the outputs of its core that a test has set, as LLMEngine.step does."""

    def __init__(self):
        self.output_processor, self.core, self.figures = Processor(), [], None
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(async_scheduling=False))

    def step(self) -> list:
        return self.output_processor.process_outputs(self.core, iteration_stats=self.figures)


class Ranks:
    """vLLM's executor of two ranks. `response_mqs`: what each has answered and nobody has read yet."""

    def __init__(self, *answers: list):
        self.response_mqs = [SimpleNamespace(dequeue=(queue := deque(given)).popleft, queue=queue) for given in answers]
        self.rpc_broadcast_mq = SimpleNamespace(enqueue=self._echo)

    def _echo(self, call: tuple) -> None:
        method, (mark,), named, output_rank = call
        assert (method, named, output_rank) == ("echo", {}, None), "every rank answers"
        for one in self.response_mqs:
            one.queue.append(("ok", mark))


def core_output(request_id: str, tokens: list[int], reason: str | None = None):
    return SimpleNamespace(request_id=request_id, new_token_ids=tokens, finish_reason=reason)


def test_after_a_step_that_raised_no_rank_s_answer_to_it_is_read_by_the_next_call():
    engine = Engine()
    outputs = StepOutputs(engine)
    engine.engine_core.engine_core.model_executor = ranks = Ranks([], [("failed", "a bad request"), ("ok", None)])
    StepPace(outputs, time.monotonic).abandon()
    assert [list(one.queue) for one in ranks.response_mqs] == [[], []]


def test_only_first_and_last_outputs_pass_through_vllms_processor():
    engine = Engine()
    outputs, seen = StepOutputs(engine), engine.output_processor.seen
    for request_id in ("a-1", "b-2"):
        engine.output_processor.add(request_id)
    engine.core = [core_output("a-1", [1]), core_output("b-2", [2])]
    assert [one[:3] for one in outputs.step()] == [("a", [1], None), ("b", [2], None)]
    assert seen == ["a-1", "b-2"]
    engine.core = [core_output("a-1", [3, 4]), core_output("b-2", [5], "stop")]
    found = outputs.step()
    assert found[0] == StepOutput("a", [3, 4], None, None) and found[1][:3] == ("b", [5], "stop")
    assert found[1].whole.finished and seen == ["a-1", "b-2", "b-2"]
    engine.core = [core_output("a-1", [6]), core_output("gone-3", [7])]
    assert [one[:3] for one in outputs.step()] == [("a", [6], None)], "of a request that was aborted in this step: none"
    engine.core = []
    assert outputs.step() == []


def test_where_vllm_keeps_figures_it_gets_all_outputs():
    engine = Engine()
    outputs, engine.figures = StepOutputs(engine), object()
    engine.output_processor.add("a-1")
    for token in (1, 2):
        engine.core = [core_output("a-1", [token])]
        (found,) = outputs.step()
        assert found[:3] == ("a", [token], None) and found.whole is not None
    assert engine.output_processor.seen == ["a-1", "a-1"]
