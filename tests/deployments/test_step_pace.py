"""Steps that run ahead: what is started and ended in which order, when steps wait, and whose seconds are whose."""

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tailrace.deployments.engine.step_pace import WAITING_STEPS, StepPace
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
        self.number = self.processed_step_seq = self.places = 0

    def has_requests(self) -> bool:
        return bool(self.sizes)

    @property
    def sched_step_seq(self) -> int:
        return self.number

    def _drain_deferred_frees(self) -> None:
        self.said.append(f"freed up to {self.processed_step_seq}")

    def schedule(self):
        self.number += 1
        drafts = {"scheduled_spec_decode_tokens": {"a": [-1] * self.number}, "num_spec_tokens_to_schedule": self.places}
        return SimpleNamespace(number=self.number, total_num_scheduled_tokens=self.sizes.popleft(), **drafts)

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
    assert core.said == ["transfers 2", "freed up to 2"], "else results and blocks would wait for ever"
    core.said.clear()
    assert scheduling.in_flight == 0 and core.said_of(scheduling, False) == ["start 3", "end 3"]
    core.faults[4] = RuntimeError("second")
    core.said_of(scheduling, True)
    scheduling.abandon()
    assert scheduling.in_flight == 0


class Time:
    """A clock that a call for a step moves on."""

    def __init__(self):
        self.now_s, self.call_s = 0.0, 0.0

    def __call__(self) -> float:
        return self.now_s


class Outputs:
    """StepOutputs over a core, whose calls take the clock's `call_s`."""

    def __init__(self, core: Core, time: Time, waits: bool = False):
        self.core, self.time, self.ahead = core, time, []
        self.scheduling = None if waits else AsyncScheduling(core)

    def drop_answers(self) -> None:
        """Does nothing: there is one rank."""

    def step(self, ahead: bool) -> list:
        self.ahead.append(ahead)
        if self.scheduling is not None:
            self.scheduling.set(ahead)
            self.core.step_fn()
        self.time.now_s += self.time.call_s
        return []


class Setting:
    def __init__(self, steps: int = 9, waits: bool = False):
        self.time = Time()
        self.outputs = Outputs(Core(*[1] * steps), self.time, waits)
        self.pace = StepPace(self.outputs, self.time, lambda: (self.outputs.core.number, 0))

    def step(self, chunks, may_run_ahead: bool = True):
        """A call for a step, as the stepper makes it."""
        self.outputs.step(self.pace.begin(chunks, may_run_ahead))
        return self.pace.end()

    def runs_ahead(self, chunks, may_run_ahead: bool = True) -> bool:
        """Whether the next step runs ahead; then it is the only one in flight."""
        self.pace.finish()
        self.step(chunks, may_run_ahead)
        return self.outputs.ahead[-1]

    def turn(self, began_s: float, ended_s: float, tokens: int) -> tuple[int, float] | None:
        """Calls for a step that verifies so many tokens. Returns those of the step that it ends, and its seconds."""
        self.time.now_s, self.time.call_s = began_s, ended_s - began_s
        done = self.step([chunk() for _ in range(tokens)])
        assert self.pace.began_s == began_s and (done is None or done.ended_s == ended_s)
        return None if done is None else (done.work.verified_tokens, done.took_s)

    def leave(self, at_s: float, has_chunks: bool = True) -> None:
        self.time.now_s = at_s
        self.pace.leave(False, has_chunks)


def chunk(drafts=(), is_out=False, drawn_on_host=False):
    request = SimpleNamespace(spec_token_ids=list(drafts), num_computed_tokens=7, next_decode_eligible_step=0)
    return SimpleNamespace(request=request, is_out=is_out, first_token_s=1.0, drawn_on_host=drawn_on_host)


def test_a_step_waits_for_drafts_for_one_more_step_and_for_a_search():
    setting = Setting(90)
    assert setting.runs_ahead([chunk()])
    assert not setting.runs_ahead([chunk()], False)
    assert not setting.runs_ahead([]) and not setting.runs_ahead([chunk(is_out=True)])
    assert not setting.runs_ahead([chunk(), chunk([7])])
    setting.pace.leave(True, True)
    for _ in range(WAITING_STEPS):
        assert not setting.runs_ahead([chunk()])
        setting.pace.leave(False, True)
    assert setting.runs_ahead([chunk()])
    assert not Setting(waits=True).runs_ahead([chunk()])


def test_a_step_runs_ahead_of_drafts_on_the_device_unless_the_host_draws():
    setting, on_device, on_host = Setting(90), chunk([-1, -1]), chunk(drawn_on_host=True)
    assert setting.runs_ahead([on_device, chunk()])
    assert not setting.runs_ahead([on_device, chunk([7])])
    assert not setting.runs_ahead([on_device, on_host]), "the host does not know at which position it draws"
    assert setting.runs_ahead([chunk(), on_host])
    assert setting.runs_ahead([on_device, chunk(is_out=True, drawn_on_host=True)])


def test_a_step_knows_its_own_drafts_and_whether_the_drafter_ran():
    setting = Setting()
    core = setting.outputs.core
    assert setting.pace.drafts_in_flight is None and Setting(waits=True).pace.drafts_in_flight is None
    core.places = 2
    assert setting.step([chunk()]) is None and setting.pace.drafts_in_flight == {"a": [-1]}
    core.places = 0
    assert setting.step([chunk()]).proposed and setting.pace.drafts_in_flight == {"a": [-1, -1]}
    assert setting.step([chunk()]).proposed is False
    assert Setting(waits=True).step([chunk()]).proposed is None


def test_the_seconds_of_a_step_are_those_between_its_tokens_and_the_ones_before():
    setting = Setting()
    assert setting.turn(1.0, 1.25, tokens=3) is None
    assert setting.turn(1.25, 2.0, tokens=4) == (3, 1.0)  # from its start
    setting.leave(2.5)  # the host's work, while the next one computes
    assert setting.turn(9.0, 9.25, tokens=5) == (4, 0.75)  # commands in between do not count
    setting.leave(9.5, has_chunks=False)  # nothing runs any more
    assert setting.turn(20.0, 20.5, tokens=3) == (5, 0.5)
    assert setting.pace.counts == {"steps": 3, "steps_ahead": 2, "step_us": 2_250_000, "tokens": 0, "verifications": 0}
    assert sum(setting.pace.durations) == 3
    setting.pace.reset()
    assert not any(setting.pace.counts.values()) and not any(setting.pace.durations)


def test_what_was_scheduled_is_that_of_the_step_whose_tokens_come():
    setting = Setting()
    done = [setting.step([chunk()]) for _ in range(4)]
    assert [one and one.work.scheduled for one in done] == [None, (1, 0), (2, 0), (3, 0)]
    assert [one.work.ahead for one in done[1:]] == [False, True, True]


def test_an_engine_whose_steps_wait_counts_the_step_alone():
    setting = Setting(waits=True)
    assert setting.turn(1.0, 1.5, tokens=2) == (2, 0.5)
    setting.leave(2.0)
    assert setting.turn(3.0, 3.25, tokens=2) == (2, 0.25) and setting.pace.in_flight == 0
    assert setting.pace.counts["steps_ahead"] == 0


def test_steps_in_flight_end_before_commands_and_are_dropped_after_an_error():
    setting = Setting()
    for _ in range(3):
        setting.step([chunk()])
    setting.pace.finish()
    assert setting.pace.in_flight == 0 and setting.pace.counts["steps"] == 3
    setting.step([chunk()])
    setting.pace.abandon()
    assert setting.pace.in_flight == 0 and setting.pace.counts["steps"] == 3
    assert setting.step([chunk()], False) is not None
