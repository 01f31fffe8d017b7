"""An engine's commands and steps over a scripted stepper: no command of one caller harms another's chunks."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tailrace.deployments.engine.engine_loop import (
    EARLY_ABORTS,
    LOAD_ALLOWANCE_S,
    SLOW_STEPS,
    SNAPSHOT_S,
    STEP_ALLOWANCE_S,
    EngineLoop,
)
from tailrace.deployments.messages.chunk import KV_CACHE, TAGS, WEIGHTS
from tailrace.deployments.messages.command import (
    CheckWeights,
    FallAsleep,
    ForgetAdapter,
    LoadAdapter,
    LoadWeights,
    NameAdapter,
    Peek,
    ReadWeights,
    RejoinPool,
    ResetCache,
    TransferWeights,
    WakeKv,
)
from tailrace.deployments.messages.errors import EngineDown, RequestRefused


class Script:
    """A stepper that ends each chunk in the next step. `step_s`: seconds that a step takes; `on_*`: errors to raise."""

    def __init__(self, clock):
        self.clock, self.running, self.loaded, self.scored = clock, [], [], []
        self.progress_s = 0.0
        self.step_s, self.on_step, self.on_load, self.on_refusal = 0.1, None, None, None
        self.on_add = {}  # by chunk id
        self.in_step = lambda: None
        self.steps_of_a_chunk, self.snapshots = 1, 0
        self.calls, self.asleep, self.on_sleep = [], (), None
        self.adapters = SimpleNamespace(
            load=self.noted("load", 1), name=self.noted("name"), forget=self.noted("forget")
        )
        self.weights = self
        self.rejoin_pool, self.transfer = self.noted("rejoin_pool"), self.noted("transfer", "source")
        self.read_back, self.peek = self.noted("read_back", "read"), self.noted("peek", "tokens")

    def noted(self, name, answer=None):
        """A call that does nothing else."""

        def call(*arguments):
            self.in_step()
            self.calls.append((name, *arguments))
            return answer

        return call

    @property
    def busy(self):
        return bool(self.running)

    def add(self, chunk, submitted_s):
        if chunk.chunk_id in self.on_add:
            raise self.on_add[chunk.chunk_id]
        if chunk.chunk_id in self.running:
            raise ValueError("already running here")
        self.running.append(chunk.chunk_id)

    def abort(self, chunk_id, keep_kv):
        self.calls.append(("abort", chunk_id, keep_kv))

    def fall_asleep(self):
        self.in_step()
        if self.on_sleep:
            raise self.on_sleep
        self.asleep = TAGS

    def wake_kv(self):
        self.asleep = (WEIGHTS,)

    def score(self, steps):
        self.progress_s = self.clock.now  # it runs steps
        self.scored.append(("after", *self.loaded[-1:]))

    def score_again(self, steps):
        self.progress_s = self.clock.now
        self.scored.append(("before", *self.loaded[-1:]))

    def step(self):
        self.clock.now += self.step_s
        self.progress_s = self.clock.now
        self.in_step()
        if self.on_step:
            raise self.on_step
        self.steps_of_a_chunk -= 1
        if self.steps_of_a_chunk > 0:
            return []
        ended, self.running = self.running, []
        return [(chunk_id, f"result of {chunk_id}") for chunk_id in ended]

    def load(self, version, source, digest):
        self.in_step()
        if self.on_load:
            raise self.on_load
        self.loaded.append((version, source, digest))
        self.asleep = tuple(tag for tag in self.asleep if tag != WEIGHTS)

    def refusal(self, source):
        if self.on_refusal:
            raise self.on_refusal
        return f"no {source}"

    def reset_cache(self):
        return not self.running

    def stats(self):
        self.snapshots += 1
        version, _, digest = self.loaded[-1] if self.loaded else (0, "", "start")
        parts = {"replica_id": "r", "weights_version": version, "weights_digest": digest, "asleep": self.asleep}
        return SimpleNamespace(running=self.running, **parts)

    def close(self):
        self.loaded.append("closed")


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


@pytest.fixture
def script(clock):
    return Script(clock)


@pytest.fixture
def loop(script, clock):
    return EngineLoop(script, lambda: clock.now)


def submit(loop: EngineLoop, chunk_id: str) -> list:
    answers = []
    loop.submit(SimpleNamespace(chunk_id=chunk_id), answers.append)
    return answers


def test_a_chunk_is_answered_once_and_a_refused_one_alone(loop):
    first, second, twice = submit(loop, "a"), submit(loop, "b"), submit(loop, "a")
    assert loop.turn(0.0)
    assert (first, second) == (["result of a"], ["result of b"])
    assert [str(error) for error in twice] == ["chunk a: already running here"]


def test_a_chunk_that_comes_again_before_its_end_is_answered_is_refused_and_ends_no_engine(loop, script):
    """A new coordinator counts a sample's chunks from the start, and the former one's is aborted, but not answered."""
    script.add = lambda chunk, submitted_s: script.running.append(chunk.chunk_id)  # as one that knows no ended chunk
    script.steps_of_a_chunk = 2
    first = submit(loop, "a")
    assert loop.turn(0.0) and not first
    loop.abort("a")
    again = submit(loop, "a")
    assert loop.turn(0.0) and loop.healthy and first == ["result of a"]
    assert [str(error) for error in again] == ["chunk a: already running here"]


ERRORS = RequestRefused("never"), OverflowError("2**31"), TypeError("None"), UnicodeEncodeError("u", "x", 0, 1, "half")


@pytest.mark.parametrize("error", [*ERRORS, RuntimeError("vLLM"), KeyError("a"), AssertionError()])
def test_whatever_a_new_chunk_raises_ends_that_chunk_alone(loop, script, error):
    script.on_add["b"] = error
    first, refused, last = (submit(loop, name) for name in "abc")
    assert loop.turn(0.0) and loop.healthy
    assert (first, refused, last) == (["result of a"], [error], ["result of c"])


def test_figures_are_renewed_by_news_and_by_age_not_by_every_step(loop, script):
    script.step_s, script.steps_of_a_chunk = SNAPSHOT_S / 8, 100
    answers = submit(loop, "a")
    loop.turn(0.0)
    assert script.snapshots == 2, "a chunk came"
    while not answers:
        before = script.snapshots
        loop.turn(0.0)
    assert 2 + 99 // 9 <= script.snapshots <= 3 + 99 // 8 and script.snapshots > before, "a chunk ended"
    loop.turn(0.0)
    assert script.snapshots > before + 1, "an idle engine's are of now"


def test_a_caller_that_has_its_answer_finds_it_in_the_figures(loop, script):
    script.steps_of_a_chunk, seen = 3, []
    loop.submit(SimpleNamespace(chunk_id="a"), lambda result: seen.append((result, loop.stats().running)))
    while not seen and loop.turn(0.0):
        pass
    assert seen == [("result of a", [])]


def test_a_load_waits_for_chunks_in_flight_and_later_chunks_for_the_load(loop, script):
    early = submit(loop, "a")
    loaded = loop.ask(LoadWeights(1, "w1"))
    late = submit(loop, "b")
    loop.turn(0.0)
    assert early == ["result of a"] and loaded.result(0) is None and script.loaded == [(1, "w1", "")]
    assert not late
    loop.turn(0.0)
    assert late == ["result of b"]


def test_a_load_of_what_is_there_changes_nothing(loop, script):
    for _ in range(2):
        done = loop.ask(LoadWeights(1, "w1", "one"))
        loop.turn(0.0)
        assert done.result(0) is None
    assert script.loaded == [(1, "w1", "one")]
    assert script.scored == [("before",), ("after", (1, "w1", "one"))]


def test_weights_that_were_set_aside_leave_no_kv_to_those_that_replace_them(loop, script):
    """Of the same version and digest, so under the same names: samples went on with the KV of the broken ones."""
    script.reset_cache = script.noted("reset_cache", True)
    for digest, resets in (("one", 0), ("one", 0), ("", 1)):
        done = loop.ask(LoadWeights(1, "w1", digest))
        loop.turn(0.0)
        assert done.result(0) is None and script.calls.count(("reset_cache",)) == resets
    assert script.loaded == [(1, "w1", "one"), (1, "w1", "")]


@pytest.mark.parametrize("error", [ValueError("no"), TypeError("None"), RecursionError("deep"), OSError("disk")])
def test_a_failed_check_of_weights_harms_nobody(loop, script, error):
    script.on_refusal = error
    asked, chunk = loop.ask(CheckWeights("x")), submit(loop, "a")
    assert loop.turn(0.0) and loop.healthy
    assert asked.exception(0) is error and chunk == ["result of a"]


def test_a_refused_load_goes_to_its_caller_and_a_broken_one_ends_the_engine(loop, script):
    script.on_load = ValueError("does not fit")
    refused = loop.ask(LoadWeights(1, "w1"))
    assert loop.turn(0.0) and str(refused.exception(0)) == "does not fit"
    script.on_load = RuntimeError("half loaded")
    broken, waiting = loop.ask(LoadWeights(1, "w1")), submit(loop, "a")
    assert not loop.turn(0.0) and not loop.healthy
    loop.end()
    assert str(broken.exception(0)) == "half loaded" and isinstance(waiting[0], EngineDown)
    assert "half loaded" in loop.problem


def test_a_caller_that_leaves_ends_no_engine(loop):
    """asyncio cancels the future of a call that it wraps."""
    for command in (ResetCache(), CheckWeights("x"), LoadWeights(1, "w1")):
        assert loop.ask(command).cancel()
    chunk = submit(loop, "a")
    assert loop.turn(0.0) and chunk == ["result of a"]


def test_a_wrapped_call_that_is_cancelled_ends_no_engine(loop):
    async def leave():
        waiting = asyncio.ensure_future(asyncio.wrap_future(loop.ask(ResetCache())))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert loop.turn(0.0) and loop.healthy


def test_a_step_that_does_not_end_is_not_healthy(loop, script, clock):
    seen = []

    def hang():
        clock.now += STEP_ALLOWANCE_S - 1.0
        seen.append(loop.healthy)
        clock.now += 2.0
        seen.append((loop.healthy, loop.problem))

    submit(loop, "a")
    script.in_step = hang
    loop.turn(0.0)
    assert seen == [True, (False, f"a step has not ended after {STEP_ALLOWANCE_S + 1.1:.0f} s")]
    assert loop.healthy, "it has ended after all"


def test_slow_engines_and_loads_get_more_time(loop, script, clock):
    seen = []

    def long_step(seconds):
        def wait():
            clock.now += seconds
            seen.append(loop.healthy)

        return wait

    submit(loop, "a")
    script.step_s = 30.0
    loop.turn(0.0)
    script.in_step = long_step(SLOW_STEPS * 30.0 - 31.0)
    submit(loop, "a")
    loop.turn(0.0)
    script.in_step = long_step(LOAD_ALLOWANCE_S - 1.0)
    loop.ask(LoadWeights(1, "w1"))
    loop.turn(0.0)
    assert seen == [True, True]


def test_a_slow_step_of_long_ago_grants_no_time(loop, script, clock):
    script.step_s = 30.0
    submit(loop, "a")
    loop.turn(0.0)
    script.step_s = 0.1
    for _ in range(500):
        submit(loop, "a")
        loop.turn(0.0)
    seen = []

    def long_step():
        clock.now += STEP_ALLOWANCE_S + 1.0
        seen.append(loop.problem)

    script.in_step = long_step
    submit(loop, "a")
    loop.turn(0.0)
    assert seen == ["a step has not ended after 61 s"] and loop.healthy


def test_the_end_answers_everybody(loop, script):
    script.on_step = ZeroDivisionError("a kernel")
    chunk, asked = submit(loop, "a"), None
    script.in_step = lambda: setattr(script, "asked", loop.ask(ResetCache()))
    assert not loop.turn(0.0)
    loop.end()
    asked = script.asked
    assert isinstance(chunk[0], EngineDown) and isinstance(asked, Future)
    assert isinstance(asked.exception(0), EngineDown) and script.loaded == ["closed"]
    assert isinstance(submit(loop, "b")[0], EngineDown)
    assert isinstance(loop.ask(ResetCache()).exception(0), EngineDown)
    assert len(chunk) == 1, "once"


def test_a_caller_that_has_left_a_broken_engine_is_not_answered(loop, script):
    script.in_step = lambda: setattr(script, "asked", [loop.ask(ResetCache()), loop.ask(ResetCache())])
    script.on_step = ZeroDivisionError("a kernel")
    submit(loop, "a")
    loop.turn(0.0)
    left, stays = script.asked
    assert left.cancel()
    loop.end()
    assert isinstance(stays.exception(0), EngineDown) and left.cancelled()


def test_a_stopped_engine_ends_its_chunks_and_waits_for_no_load(loop, script):
    script.steps_of_a_chunk = 10
    running, loaded = submit(loop, "a"), loop.ask(LoadWeights(1, "w1"))
    waiting = submit(loop, "b")
    assert loop.turn(0.0)
    loop.request_stop()
    assert not loop.turn(0.0) and loop.problem == "the engine was stopped"
    assert not running, "the end answers"
    loop.end()
    for error in (*running, *waiting, loaded.exception(0)):
        assert isinstance(error, EngineDown) and str(error) == "the engine was stopped"
    assert len(running) == len(waiting) == 1 and script.loaded == ["closed"]


@pytest.mark.parametrize(
    ("command", "call", "answer"),
    [
        (RejoinPool("10.0.0.1:50051"), ("rejoin_pool", "10.0.0.1:50051"), None),
        (TransferWeights("phase"), ("transfer", "phase"), "source"),
        (ReadWeights(), ("read_back",), "read"),
        (LoadAdapter("/adapters/poet"), ("load", "/adapters/poet"), 1),
        (NameAdapter("poet"), ("name", "poet"), None),
        (ForgetAdapter("poet"), ("forget", "poet"), None),
        (Peek("a"), ("peek", "a"), "tokens"),
    ],
)
def test_each_command_is_the_stepper_s_and_its_answer_the_caller_s(loop, script, command, call, answer):
    asked = loop.ask(command)
    assert script.calls == [] and not asked.done(), "the loop's thread does it"
    loop.turn(0.0)
    assert script.calls == [call] and asked.result(0) == answer


def test_a_command_that_is_none_is_refused_alone(loop):
    asked = loop.ask("load everything")
    assert loop.turn(0.0) and loop.healthy
    assert str(asked.exception(0)) == "an engine's loop does not know the command str"


@pytest.mark.parametrize(
    ("command", "is_slow"),
    [
        (LoadWeights(1, "w1"), True),
        (FallAsleep(), True),
        (TransferWeights("phase"), True),
        (ReadWeights(), True),
        (LoadAdapter("folder"), True),
        (RejoinPool("address"), False),
        (Peek("a"), False),
    ],
)
def test_weights_alone_may_take_long_and_do_not_make_later_turns_long(loop, script, clock, command, is_slow):
    seen = []

    def wait(seconds):
        def waits():
            clock.now += seconds
            seen.append(loop.healthy)

        return waits

    script.in_step = wait(LOAD_ALLOWANCE_S - 1.0)
    loop.ask(command)
    loop.turn(0.0)
    script.in_step = wait(STEP_ALLOWANCE_S + 1.0)
    submit(loop, "a")
    loop.turn(0.0)
    assert seen[0] is is_slow
    if is_slow:
        assert seen == [True, False], "a load says nothing of the steps after it"


def test_an_abort_reaches_a_chunk_that_runs_at_once_and_one_that_waits_for_a_load_after_it(loop, script):
    script.steps_of_a_chunk = 3
    submit(loop, "a")
    loop.turn(0.0)
    loop.ask(LoadWeights(1, "w1"))
    submit(loop, "b")
    loop.abort("a", keep_kv=True)
    loop.abort("b")
    loop.turn(0.0)
    assert script.calls == [("abort", "a", True)], "it is in flight"
    while not script.loaded:
        loop.turn(0.0)
    assert script.calls == [("abort", "a", True), ("abort", "b", False)]


@pytest.mark.parametrize("by_ray", [True, False])
def test_an_abort_that_overtakes_a_chunk_with_images_ends_it_once_and_no_chunk_of_a_line(loop, script, by_ray):
    def submit_again() -> None:
        features = "images" if by_ray else None
        loop.submit(SimpleNamespace(chunk_id="a", features=features, draft=None), [].append)
        loop.turn(0.0)

    loop.abort("a", keep_kv=True)
    loop.turn(0.0)
    assert script.calls == [("abort", "a", True)], "it is not here"
    submit_again()
    assert script.calls[1:] == ([("abort", "a", False)] if by_ray else [])
    submit_again()
    assert len(script.calls) == 1 + by_ray, "a chunk of this name of a later coordinator runs"


def test_aborts_of_chunks_that_never_come_take_little_memory(loop, script):
    for number in range(2 * EARLY_ABORTS):
        loop.abort(f"c{number}")
    loop.turn(0.0)
    assert len(loop._early) == EARLY_ABORTS and len(script.calls) == 2 * EARLY_ABORTS


def test_the_caller_of_a_load_sees_the_new_version_and_the_pause(loop, script, clock):
    seen = []

    def takes_2_s():
        clock.now += 2.0

    submit(loop, "a")
    loop.turn(0.0)  # the last token, at 0.1 s
    clock.now = 5.0
    loaded = loop.ask(LoadWeights(1, "w1"))
    loaded.add_done_callback(lambda _: seen.append((loop.stats().weights_version, loop.weights_pause_s)))
    script.in_step = takes_2_s
    loop.turn(0.0)
    assert seen == [(1, 2.0)], "it was idle before"
    script.in_step = lambda: None
    submit(loop, "a")
    loaded = loop.ask(LoadWeights(2, "w2"))
    loaded.add_done_callback(lambda _: seen.append((loop.stats().weights_version, round(loop.weights_pause_s, 6))))
    script.step_s = 3.0
    loop.turn(0.0)
    assert seen[1] == (2, 0.0), "it made tokens until the load"


def test_a_sleep_waits_for_chunks_and_the_weights_come_back_by_a_load_of_the_same(loop, script):
    script.steps_of_a_chunk = 2
    running = submit(loop, "a")
    loop.ask(LoadWeights(1, "w1", "one"))
    asleep = loop.ask(FallAsleep())
    loop.turn(0.0)
    assert not running and not asleep.done()
    loop.turn(0.0)
    assert running and asleep.done() and loop.stats().asleep == TAGS
    woken = loop.ask(LoadWeights(1, "w1", "one"))
    loop.turn(0.0)
    assert woken.done() and script.loaded == [(1, "w1", "one")] * 2 and loop.stats().asleep == (KV_CACHE,)
    loop.ask(WakeKv())
    loop.turn(0.0)
    assert loop.stats().asleep == (WEIGHTS,), "the script's"


def test_an_engine_whose_kv_is_awake_is_not_scored_again_and_loses_no_answer(loop, script):
    script.score = lambda steps: script.step() and script.scored.append("score")  # it drops results, as a score does
    script.wake_kv = lambda: setattr(script, "asleep", ())
    script.asleep = (KV_CACHE,)
    loop.turn(0.0)
    first, second, answer = loop.ask(WakeKv()), loop.ask(WakeKv()), submit(loop, "a")
    loop.ask(WakeKv())
    loop.turn(0.0)
    assert first.done() and second.done() and answer == ["result of a"], "a later one came while the chunk ran"
    loaded = loop.ask(LoadWeights(1, "w1"))
    loop.turn(0.0)
    assert loaded.done(), "no chunk is in flight"


def test_a_refused_sleep_goes_to_its_caller_and_a_broken_one_ends_the_engine(loop, script):
    script.on_sleep = ValueError("its folder has changed")
    refused = loop.ask(FallAsleep())
    assert loop.turn(0.0) and refused.exception(0) is script.on_sleep and loop.stats().asleep == ()
    script.on_sleep = RuntimeError("half asleep")
    loop.ask(FallAsleep())
    assert not loop.turn(0.0) and "half asleep" in loop.problem


def test_other_commands_do_not_wait_for_a_load(loop, script):
    script.steps_of_a_chunk = 5
    submit(loop, "a")
    loaded = loop.ask(LoadWeights(1, "w1"))
    asked = loop.ask(ResetCache())
    loop.turn(0.0)
    assert asked.result(0) is False and not loaded.done()


def test_loads_come_in_the_order_in_which_they_were_asked_for(loop, script):
    submit(loop, "a")
    loop.ask(LoadWeights(1, "w1"))
    between = submit(loop, "b")
    loop.ask(LoadWeights(2, "w2"))
    loop.turn(0.0)
    assert script.loaded == [(1, "w1", "")] and not between, "the second waits for the chunk between"
    loop.turn(0.0)
    assert script.loaded == [(1, "w1", ""), (2, "w2", "")] and between == ["result of b"]


def test_an_engine_whose_cache_cannot_be_dropped_does_not_sleep(loop, script):
    script.reset_cache = lambda: False
    refused = loop.ask(FallAsleep())
    assert loop.turn(0.0) and str(refused.exception(0)) == "an engine cannot sleep while chunks run"
    assert loop.stats().asleep == ()
