"""Steps that run ahead: what is started and ended in which order, when steps wait, and whose seconds are whose."""

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tailrace.deployments.engine.step_pace import WAITING_STEPS, StepPace, StepWork
from tailrace.deployments.vllm_exact.async_scheduling import AsyncScheduling


class Answer:
    def __init__(self, value):
        self.value = value

    def result(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Core:
    """vLLM's EngineCore as far as a step needs it. `sizes`: tokens of the steps that its scheduler plans."""

    def __init__(self, *sizes: int):
        self.sizes, self.said = deque(sizes), []
        self.scheduler = self.model_executor = self
        self.faults: dict[int, Exception] = {}  # of a step's tokens, by its number
        self.number = 0

    def has_requests(self) -> bool:
        return bool(self.sizes)

    def schedule(self):
        self.number += 1
        return SimpleNamespace(number=self.number, total_num_scheduled_tokens=self.sizes.popleft())

    def execute_model(self, scheduled, non_block):
        self.said.append(f"start {scheduled.number}")
        self.last = scheduled
        return Answer(None if scheduled.total_num_scheduled_tokens else SimpleNamespace(number=scheduled.number))

    def sample_tokens(self, grammar, non_block):
        number = self.last.number
        return Answer(
            self.faults.get(number, SimpleNamespace(number=number, kv_connector_output=f"transfers {number}"))
        )

    def update_from_output(self, scheduled, found):
        assert scheduled.number == found.number
        self.said.append(f"end {found.number}")
        return {0: SimpleNamespace()}

    def _update_from_kv_xfer_finished(self, report):
        self.said.append(report)

    def log_error_detail(self, scheduled):
        return nullcontext()

    def _attach_weight_version(self, outputs):
        outputs[0].weight_version = ""

    def said_of(self, scheduling, *ahead: bool) -> list[str]:
        for each in ahead:
            scheduling.set(each)
            self.step_fn()
        said, self.said = self.said, []
        return said


def test_a_step_ahead_starts_before_the_one_before_ends():
    core = Core(1, 1, 1, 1)
    scheduling = AsyncScheduling(core)
    assert core.said_of(scheduling, True) == ["start 1"]
    assert (scheduling.started, scheduling.ended, scheduling.in_flight) == (True, False, 1)
    assert core.said_of(scheduling, True, True) == ["start 2", "end 1", "start 3", "end 2"]
    assert core.said_of(scheduling, False) == ["end 3"]  # whoever waits first ends what is in flight
    assert core.said_of(scheduling, False) == ["start 4", "end 4"]
    assert core.said_of(scheduling, True, False) == [] and not scheduling.ended


def test_the_last_step_ends_although_nothing_is_left_to_start():
    core = Core(1, 1)
    scheduling = AsyncScheduling(core)
    assert core.said_of(scheduling, True, True, True, True) == ["start 1", "start 2", "end 1", "end 2"]
    assert scheduling.in_flight == 0


def test_steps_without_tokens_are_ended_too():
    core = Core(0, 0, 5)
    scheduling = AsyncScheduling(core)
    assert core.said_of(scheduling, True, True) == ["start 1", "start 2", "end 1"] and not scheduling.computing
    assert core.said_of(scheduling, True) == ["start 3", "end 2"] and scheduling.computing


def test_an_error_comes_from_the_step_that_has_it_and_the_rest_can_be_abandoned():
    core = Core(1, 1, 1, 1)
    core.faults[1] = RuntimeError("first")
    scheduling = AsyncScheduling(core)
    core.said_of(scheduling, True)
    with pytest.raises(RuntimeError, match="first"):
        core.said_of(scheduling, True)
    assert scheduling.in_flight == 1
    core.said.clear()
    scheduling.abandon()
    assert core.said == ["transfers 2"], "else results would wait for saves that have ended"
    core.said.clear()
    assert scheduling.in_flight == 0 and core.said_of(scheduling, False) == ["start 3", "end 3"]
    core.faults[4] = RuntimeError("second")
    core.said_of(scheduling, True)
    scheduling.abandon()
    assert scheduling.in_flight == 0


def chunk(drafts=(), is_out=False):
    return SimpleNamespace(request=SimpleNamespace(spec_token_ids=list(drafts)), is_out=is_out)


def test_a_step_waits_for_drafts_for_one_more_step_and_for_a_search():
    core = Core(*[1] * 9)
    pace = StepPace(AsyncScheduling(core))
    assert pace.begin([chunk()], True, 0.0)
    assert not pace.begin([chunk()], False, 0.0)
    assert not pace.begin([], True, 0.0) and not pace.begin([chunk(is_out=True)], True, 0.0)
    assert not pace.begin([chunk(), chunk([7])], True, 0.0)
    pace.leave(0.0, True, True)
    for _ in range(WAITING_STEPS):
        assert not pace.begin([chunk()], True, 0.0)
        pace.leave(0.0, False, True)
    assert pace.begin([chunk()], True, 0.0)
    assert not StepPace(None).begin([chunk()], True, 0.0)


def test_the_seconds_of_a_step_are_those_between_its_tokens_and_the_ones_before():
    core = Core(*[1] * 9)
    scheduling = AsyncScheduling(core)
    pace, works = StepPace(scheduling), [StepWork(size, 0, False) for size in (3, 4, 5)]

    def turn(work, began_s, ended_s):
        scheduling.set(pace.begin([chunk()], True, began_s))
        core.step_fn()
        return pace.end(work, ended_s)

    assert turn(works[0], 1.0, 1.25) is None
    assert turn(works[1], 1.25, 2.0) == (works[0], 1.0)  # from its start
    pace.leave(2.5, False, True)  # the host's work, while the next one computes
    assert turn(works[2], 9.0, 9.25) == (works[1], 0.75)  # commands in between do not count
    pace.leave(9.5, False, False)  # nothing runs any more
    assert turn(works[0], 20.0, 20.5) == (works[2], 0.5)


def test_an_engine_whose_steps_wait_counts_the_step_alone():
    pace, work = StepPace(None), StepWork(2, 0, False)
    assert not pace.begin([chunk()], True, 1.0)
    assert pace.end(work, 1.5) == (work, 0.5)
    pace.leave(2.0, False, True)
    pace.begin([chunk()], True, 3.0)
    assert pace.end(work, 3.25) == (work, 0.25) and pace.in_flight == 0
