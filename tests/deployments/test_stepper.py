"""The stepper over a scripted engine: each chunk ends once, with its own tokens, and leaves nothing behind."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from test_engine_parts import chunk_of, letters, text_of

from tailrace.deployments.engine import engine_weights, redraws, stepper
from tailrace.deployments.engine.step_outputs import StepOutput
from tailrace.deployments.engine.stepper import Stepper
from tailrace.deployments.messages.chunk import KV_CACHE, STEP_BOUNDS_S, TAGS, KvPlan
from tailrace.deployments.messages.errors import RequestRefused
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.deployments.vllm_exact.logprob_store import DrawRecord
from tailrace.policies.protocol.events import ChunkEnd


class Engine:
    """vLLM's. `script`: the outputs of each step in turn, or what it raises. `requests`: those that were added."""

    def __init__(self):
        self.script, self.calls, self.requests, self.closed, self.margin, self.resets = [], [], [], {}, 1.0, True
        self.vllm_config = SimpleNamespace(
            additional_config={},
            model_config=SimpleNamespace(model="/model", max_model_len=64),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
            lora_config=None,
        )
        scheduler = SimpleNamespace(
            requests={}, has_requests=lambda: False, finished_req_ids=set(), finished_recving_kv_req_ids=set()
        )
        core = SimpleNamespace(scheduler=scheduler, reset_encoder_cache=lambda: None)
        self.engine_core = SimpleNamespace(engine_core=core, shutdown=lambda: self.calls.append(("shutdown",)))
        self.engine_core.abort_requests = lambda names: None
        self.output_processor = SimpleNamespace(request_states={})
        self.token_logprob = -0.5

    def abort_request(self, names, internal: bool) -> None:
        assert internal

    def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset",))
        return self.resets

    def collective_rpc(self, method: str, args: tuple = ()):
        self.calls.append((method, *args))
        if method == "take_closed":
            return [self.closed]
        if method == "begin_again":
            return [[]]
        if method == "take_record":
            numbers = [
                np.full(args[2], one, np.float32) for one in (self.token_logprob, self.token_logprob, self.margin)
            ]
            return [DrawRecord(*numbers, drafted=0, accepted=0)]
        return [None]

    def named(self, method: str) -> list[tuple]:
        return [call[1:] for call in self.calls if call[0] == method]


class Requests:
    """Makes vLLM's requests. `refusals`: by chunk id."""

    tolerance, vocabulary, eos_token_id = 0.1, 100, 2

    def __init__(self, engine, tolerance, redraws_too, adapter_of):
        self.engine, self.redraws, self.aborted, self.refusals, self.fails = engine, redraws_too, [], {}, {}

    def limits(self) -> dict:
        return {"block_tokens": 32, "kv_capacity_blocks": 100, "max_model_len": 64}

    def refusal(self, chunk) -> str | None:
        return self.refusals.get(chunk.chunk_id)

    def add(self, name, chunk, context, max_tokens, kv, private=False):
        if name in self.fails:
            raise self.fails.pop(name)
        request = SimpleNamespace(
            request_id=f"{name}/{len(self.engine.requests)}", num_preemptions=0, num_computed_tokens=0,
            next_decode_eligible_step=0, spec_token_ids=[],
        )  # fmt: skip
        self.engine.requests.append((name, list(context), max_tokens, kv, private, request))
        return request

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def decode(self, token_ids) -> str:
        return text_of(token_ids)


class Outputs:
    scheduling = None

    def __init__(self, engine):
        self.engine = engine

    def step(self, ahead: bool = False) -> list[StepOutput]:
        now = self.engine.script.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    def drop_answers(self) -> None:
        self.engine.calls.append(("drop_answers",))


class Pool:
    """The pool's client. `ready`: results that it releases at the next step."""

    key_prefixes, token_bytes, scheduled = ("p",), 10, (4, 1)

    def __init__(self, engine, save_deadline_s, performance):
        self.saving, self.forgone, self.forgotten, self.ready, self.steps = [], [], [], [], []

    def wish(self, chunk) -> dict:
        return {"wish": chunk.chunk_id}

    def forgo(self, request_id) -> None:
        self.forgone.append(request_id)

    def forget(self, request_id) -> None:
        self.forgotten.append(request_id)

    def save(self, chunk_id, request_id) -> None:
        self.saving.append((chunk_id, request_id))

    def after_step(self, took_s, scheduled, decodes, now_s) -> None:
        self.steps.append(decodes)

    def saved(self) -> list:
        ready, self.ready = self.ready, []
        return ready

    def fields(self, request_id, chunk, result) -> dict:
        return {"kv_names": f"{request_id} {chunk.chunk_id} {len(result.token_ids)}".encode()}

    def counts(self) -> dict:
        return {"hit.local": 3}

    def rejoin(self, address) -> None:
        self.address = address


class Drafts:
    methods = ("group",)
    vllm = property(lambda self: self)

    def __init__(self):
        self.calls, self.fails = [], None

    def __getattr__(self, name: str):
        def call(*arguments, **named):
            self.calls.append((name, *arguments, *named.items()))
            if name == "open" and self.fails:
                raise self.fails
            return arguments[0] if name == "step" else {} if name == "counts" else None

        return call

    def named(self, name: str) -> list[tuple]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def engine(monkeypatch) -> Engine:
    engine, clock = Engine(), [100.0]

    def monotonic() -> float:
        clock[0] += 0.25
        return clock[0]

    pool_client = ModuleType("tailrace.deployments.engine.pool_client")
    pool_client.PoolClient = Pool
    monkeypatch.setitem(sys.modules, pool_client.__name__, pool_client)
    monkeypatch.setattr(engine_weights, "weights_digest", lambda folder: "ab")
    monkeypatch.setattr(redraws, "alone", lambda scheduler: nullcontext())
    monkeypatch.setattr(stepper, "launch", lambda config, rank, pool, ahead: engine)
    monkeypatch.setattr(stepper, "StepOutputs", Outputs)
    monkeypatch.setattr(stepper, "Requests", Requests)
    monkeypatch.setattr(stepper.warmup, "warm_up", lambda *given: engine.calls.append(("warm_up", *given[1:])))
    monkeypatch.setattr(stepper, "time", SimpleNamespace(monotonic=monotonic, time=lambda: 5.0, sleep=lambda _: None))
    return engine


def made(redraw: bool = False, pool: bool = False) -> Stepper:
    draft = SimpleNamespace(drafts=False)
    exact = {"close_call_tolerance": 0.1, "redraw_close_calls": redraw}
    config = SimpleNamespace(
        model="m", max_running=8, draft=draft, draft_tokens=0, keeps_routes=True, runs_ahead=False, **exact
    )
    endpoint = SimpleNamespace(config=SimpleNamespace(save_deadline_s=1.0)) if pool else None
    return Stepper(config, "r1", 4, 0, endpoint)


def chunk(name: str = "a", **fields):
    return chunk_of(**{"chunk_id": name, "kv": None, "draft": None, "forced": None, "adapter": None} | fields)


def out(name: str, *token_ids: int, reason: str | None = None) -> StepOutput:
    whole = SimpleNamespace(num_cached_tokens=3, prompt_logprobs=None)
    return StepOutput(name, list(token_ids), reason, whole)


def run(one: Stepper, engine: Engine, *steps) -> list:
    engine.script = list(steps)
    ended = []
    while engine.script:
        ended += one.step()
    return ended


def test_an_engine_starts_warm_with_an_empty_cache_and_refuses_a_model_without_an_end(engine, monkeypatch):
    one = made()
    assert engine.calls[-2:] == [("warm_up", 8, 0), ("reset",)] and not one.busy
    stats = one.stats()
    assert (stats.replica_id, stats.weights_version, stats.max_running, stats.draft_tokens) == ("r1", 4, 8, 0)
    assert (stats.steps, stats.observed_at, stats.running, stats.methods, stats.keeps_routes) == (0, 5.0, {}, (), True)
    one._performance.report = lambda now_s, at_s: (now_s > 100.0, at_s)
    one.adapters._known = {"poet": "adapter"}
    assert one.stats().performance == (True, 5.0) and one.stats().adapters == ("adapter",)
    monkeypatch.setattr(Requests, "eos_token_id", None)
    with pytest.raises(ValueError, match="model m: its tokenizer names no end-of-sequence token"):
        made()


def test_an_adapter_is_put_into_memory_that_is_there_alone(engine, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    engine.vllm_config.lora_config = SimpleNamespace(max_loras=1, max_cpu_loras=2)
    one = made()
    for one.weights.asleep, loads in ((TAGS, 0), ((KV_CACHE,), 1)):
        one.adapters.load(str(tmp_path))
        assert len(engine.named("hold_adapter")) == loads


def test_chunks_end_with_their_own_tokens_and_times(engine):
    one = made()
    one.add(chunk("a"), 99.0)
    one.add(chunk("b"), 99.5)
    (first, second) = [request for *_, request in engine.requests]
    assert one.busy and [call[:3] for call in engine.requests] == [
        ("a", list(range(10, 20)), 9), ("b", list(range(10, 20)), 9)
    ]  # fmt: skip
    first.num_computed_tokens = 10
    ended = run(one, engine, [out("a", 1)], [out("a", 2), out("b", 5)])
    assert ended == [] and one.peek("a").tolist() == [1, 2] and one.peek("b").tolist() == [5]
    second.num_computed_tokens = 10
    stats = one.stats()
    assert stats.running == {"a": 2, "b": 1} and stats.steps == 2 and stats.work["tokens"] == 3
    assert stats.work["verifications"] == 3 and stats.work["step_us"] == 500_000
    assert sum(stats.step_counts) == 2 and len(stats.step_counts) == len(STEP_BOUNDS_S) + 1
    ended = dict(run(one, engine, [out("b", 6, reason="stop"), out("a", 3, reason="length")]))
    assert ended["a"].token_ids.tolist() == [1, 2, 3] and ended["a"].end is ChunkEnd.LENGTH
    assert ended["b"].token_ids.tolist() == [5, 6] and ended["b"].end is ChunkEnd.STOP
    assert ended["a"].queue_s == 100.25 + 0.5 - 99.0 and ended["a"].queue_s != ended["b"].queue_s
    assert ended["a"].cached_tokens == 3 and len(ended["a"].logprobs) == 3
    assert not one.busy and one.peek("a").tolist() == [] and one.stats().running == {}
    assert one.stats().work["draws"] == 5


def test_a_chunk_that_cannot_run_changes_nothing(engine):
    one = made()
    one.add(chunk("a"), 1.0)
    with pytest.raises(ValueError, match="chunk a: already running here"):
        one.add(chunk("a"), 1.0)
    with pytest.raises(ValueError, match="chunk b: wants weights version 5, this is 4"):
        one.add(chunk("b", weights_version=5), 1.0)
    one._requests.refusals["b"] = "it is too long"
    with pytest.raises(RequestRefused, match="chunk b: it is too long"):
        one.add(chunk("b"), 1.0)
    one._requests.refusals.clear()
    one._requests.fails["b"] = RuntimeError("vLLM")
    with pytest.raises(RuntimeError, match="vLLM"):
        one.add(chunk("b"), 1.0)
    assert list(one.stats().running) == ["a"] and len(engine.requests) == 1
    one.add(chunk("b"), 1.0)
    assert list(one.stats().running) == ["a", "b"]


def test_an_aborted_chunk_ends_with_its_tokens_so_far_and_an_unknown_one_is_ignored(engine):
    one = made()
    one.add(chunk("a"), 1.0)
    run(one, engine, [out("a", 1)])
    one.abort("another", keep_kv=True)
    one.abort("a", keep_kv=False)
    ((name, result),) = run(one, engine, [])
    assert (name, result.end, result.token_ids.tolist()) == ("a", ChunkEnd.ABORTED, [1])
    assert one._requests.aborted == [engine.requests[0][5].request_id] and not one.busy


def test_a_stop_text_ends_a_chunk_with_the_token_that_completes_it(engine):
    one = made(pool=True)
    sampling = SamplingParams(stop=("END",))
    for name, plan in (("a", KvPlan(4, save_stopped=True)), ("b", KvPlan(4)), ("c", None)):
        one.add(chunk(name, sampling=sampling, kv=plan, weights_digest="ab"), 1.0)
    ids = {name: request.request_id for name, *_, request in engine.requests}
    run(one, engine, [out("a", *letters("END!")), out("b", *letters("END!")), out("c", *letters("no"))])
    assert one._requests.aborted == [ids["a"], ids["b"]] and one._pool.forgone == [ids["b"]]
    assert one._pool.saving == [("a", ids["a"]), ("b", ids["b"])]
    run(one, engine, [out("c", *letters("EN"))], [out("c", *letters("D"), reason="length")])
    assert len(one._requests.aborted) == 2, "vLLM has ended it"
    one._pool.ready = ["a", "b", "c"]
    ended = run(one, engine, [])
    assert [(name, text_of(result.token_ids), result.end) for name, result in ended] == [
        ("a", "END", ChunkEnd.STOP), ("b", "END", ChunkEnd.STOP), ("c", "noEND", ChunkEnd.STOP)
    ]  # fmt: skip


def test_with_a_pool_results_wait_for_their_saves_and_then_say_what_the_pool_knows(engine):
    one = made(pool=True)
    one.add(chunk("a"), 1.0)
    one.add(chunk("b"), 1.0)
    assert [kv for *_, kv, _, _ in engine.requests] == [{"wish": "a"}, {"wish": "b"}]
    assert run(one, engine, [out("a", 1, reason="length")]) == []
    assert one._pool.saving == [("a", "a/0")]
    assert one.stats().running == {"b": 0, "a": 1} and one.stats().kv_counts == {"hit.local": 3}
    one._pool.ready = ["a"]
    ((name, result),) = run(one, engine, [out("b", 1)])
    assert (name, result.token_ids.tolist(), result.end, result.kv_names) == ("a", [1], ChunkEnd.LENGTH, b"a/0 a 1")
    assert run(one, engine, [out("b", 2)]) == [] and one._pool.steps == [False, False, True]
    one.abort("b", keep_kv=True)
    assert one._pool.forgone == [] and one._pool.saving[-1][0] == "b" and one.busy
    one.rejoin_pool("10.0.0.3:1")
    assert one._pool.address == "10.0.0.3:1"
    one._pool.ready = ["b"]
    ((name, result),) = run(one, engine, [])
    assert (name, result.end) == ("b", ChunkEnd.ABORTED) and not one.busy


def test_a_chunk_without_a_distribution_or_with_a_strange_end_has_no_result(engine):
    one = made(pool=True)
    one.add(chunk("a"), 1.0)
    one.add(chunk("b"), 1.0)
    ((name, error),) = run(one, engine, [out("b", 1, reason="error")])
    assert name == "b" and str(error) == "chunk b: vLLM ended it with 'error'"
    engine.token_logprob = float("nan")
    ((name, error),) = run(one, engine, [out("a", 1, reason="length")])
    assert name == "a" and "the model's logits are no numbers" in str(error)
    assert one._pool.saving == [] and len(one._pool.forgotten) == 2 and not one.busy


def test_preemptions_of_chunks_that_have_ended_stay_counted(engine):
    one = made()
    one.add(chunk("a"), 1.0)
    engine.requests[0][5].num_preemptions = 3
    assert one.stats().preemptions == 3
    run(one, engine, [out("a", 1, reason="length")])
    one.add(chunk("b"), 1.0)
    engine.requests[1][5].num_preemptions = 4
    assert one.stats().preemptions == 7
    one._fail(one._running["b"], ValueError("odd"))
    assert one.stats().preemptions == 7, "of one without a result, too"


def test_drafts_are_opened_proposed_and_closed_and_one_that_fails_leaves_no_chunk(engine):
    one = made()
    drafts = one._drafts = Drafts()
    one.add(chunk("a"), 1.0)
    ((opened, request),) = drafts.named("open")
    assert opened.chunk_id == "a" and request is engine.requests[0][5]
    drafts.fails = ValueError("no room")
    with pytest.raises(ValueError, match="no room"):
        one.add(chunk("b"), 1.0)
    assert list(one._running) == ["a"] and one._requests.aborted == [engine.requests[1][5].request_id]
    drafts.fails = None
    run(one, engine, [out("a", 1, 2)], [out("a", 3, reason="length")])
    assert drafts.named("made_by") == [([("a", [1, 2])],), ([("a", [3])],)] and len(drafts.named("propose")) == 2
    assert drafts.named("close") == [("b",), ("a", True, 0)]
    one.add(chunk("c"), 1.0)
    run(one, engine, [out("c", 1)])
    one.draft_for_all([5, 6])
    assert engine.requests[-1][5].spec_token_ids == [5, 6] and one.stats().methods == ("group",)
    one.close()
    assert drafts.named("stop") == [()] and engine.calls[-1] == ("shutdown",)


# ---- close calls ----------------------------------------------------------------------------------------


def closing(engine: Engine, one: Stepper, at: int) -> None:
    """The token at this position of chunk `a` was a close call."""
    engine.closed = {one._running["a"].request_id: at}


def redrawn(engine: Engine, one: Stepper, token: int, reason: str = "length") -> StepOutput:
    return out(f"redraw {one._redraws.counts['redraws']} of a", token, reason=reason)


def test_a_close_call_that_comes_out_the_same_changes_nothing(engine):
    one = made(redraw=True)
    one.add(chunk("a"), 1.0)
    closing(engine, one, 11)
    run(one, engine, [out("a", 1, 2)], [redrawn(engine, one, 2)])
    assert one.peek("a").tolist() == [1, 2] and one._requests.aborted == []
    (_, redraw) = engine.requests
    assert redraw[:5] == ("redraw 0 of a", [*range(10, 20), 1], 1, None, True), "its own KV, read by none"
    assert engine.named("take_record")[0] == (redraw[5].request_id, 11, 1)
    counts = one.stats().work
    assert (counts["redraws"], counts["redraws_changed"]) == (1, 0)


def test_a_call_that_was_not_close_is_not_drawn_again(engine):
    one = made(redraw=True)
    one.add(chunk("a"), 1.0)
    closing(engine, one, 10)
    run(one, engine, [out("a", 1, 2)])
    assert len(engine.requests) == 1 and one.stats().work["redraws"] == 0
    engine.closed = {}
    run(one, engine, [out("a", 3)])
    assert len(engine.requests) == 1
    plain = made(redraw=False)
    plain.add(chunk("a"), 1.0)
    engine.calls.clear()
    run(plain, engine, [out("a", 1)])
    assert engine.named("take_closed") == []


def test_a_token_that_changes_takes_the_place_of_the_other_and_the_chunk_goes_on_from_it(engine):
    one = made(redraw=True)
    one.add(chunk("a", max_tokens=6), 1.0)
    first = one._running["a"].request_id
    run(one, engine, [out("a", 7)])
    closing(engine, one, 12)
    ended = run(one, engine, [out("a", 1, 2)], [redrawn(engine, one, 5)])
    engine.closed = {}
    assert ended == [] and one.peek("a").tolist() == [7, 1, 5] and one._requests.aborted == [first]
    continued = engine.requests[-1]
    assert continued[:5] == ("a", [*range(10, 20), 7, 1, 5], 3, None, False)
    assert one._running["a"].request_id == continued[5].request_id
    assert (first, 10, 3) in engine.named("take_record"), "the record of its first request"
    ((_, result),) = run(one, engine, [out("a", 8, reason="length")])
    assert result.token_ids.tolist() == [7, 1, 5, 8] and len(result.logprobs) == 4
    assert (continued[5].request_id, 13, 1) in engine.named("take_record")
    assert one.stats().work["redraws_changed"] == 1


@pytest.mark.parametrize(
    ("drawn_reason", "max_tokens", "step_reason", "end", "is_aborted"),
    [
        ("stop", 6, None, ChunkEnd.STOP, True),
        ("length", 2, "length", ChunkEnd.LENGTH, False),
        ("length", 2, None, ChunkEnd.LENGTH, True),
    ],
)
def test_a_token_that_changes_may_end_the_chunk(engine, drawn_reason, max_tokens, step_reason, end, is_aborted):
    one = made(redraw=True)
    one.add(chunk("a", max_tokens=max_tokens), 1.0)
    first = one._running["a"].request_id
    closing(engine, one, 11)
    drawn = redrawn(engine, one, 5, drawn_reason)
    ((_, result),) = run(one, engine, [out("a", 1, 2, reason=step_reason)], [drawn])
    assert (result.token_ids.tolist(), result.end) == ([1, 5], end)
    assert len(engine.requests) == 2 and one._requests.aborted == ([first] if is_aborted else [])


def test_a_close_call_after_a_stop_text_is_not_drawn_again(engine):
    one = made(redraw=True)
    one.add(chunk("a", sampling=SamplingParams(stop=("END",))), 1.0)
    first = one._running["a"].request_id
    closing(engine, one, 13)
    ((_, result),) = run(one, engine, [out("a", *letters("END!"))])
    assert (text_of(result.token_ids), result.end, len(result.logprobs)) == ("END", ChunkEnd.STOP, 3)
    assert len(engine.requests) == 1 and one._requests.aborted == [first]
    assert engine.named("take_record")[-1] == (first, 10, 3)


@pytest.mark.parametrize(
    ("made_text", "drawn", "whole", "is_end"),
    [("END", "D", "END", True), ("ENX", "D", "END", True), ("END", "X", "ENX", False)],
)
def test_the_token_that_is_drawn_again_decides_whether_a_stop_text_is_complete(engine, made_text, drawn, whole, is_end):
    one = made(redraw=True)
    one.add(chunk("a", sampling=SamplingParams(stop=("END",))), 1.0)
    closing(engine, one, 12)
    ended = run(one, engine, [out("a", *letters(made_text))], [redrawn(engine, one, *letters(drawn))])
    assert [(text_of(result.token_ids), result.end) for _, result in ended] == [(whole, ChunkEnd.STOP)] * is_end
    assert one.busy is not is_end and text_of(one.peek("a")) == ("" if is_end else whole)


def test_a_stop_that_is_drawn_otherwise_is_none_and_the_chunk_goes_on(engine):
    one = made(redraw=True)
    one.add(chunk("a", max_tokens=6), 1.0)
    closing(engine, one, 11)
    assert run(one, engine, [out("a", 1, 2, reason="stop")], [redrawn(engine, one, 5)]) == []
    assert one.peek("a").tolist() == [1, 5] and one._requests.aborted == [], "its request has ended by itself"
    assert engine.requests[-1][:3] == ("a", [*range(10, 20), 1, 5], 4)


def test_a_redrawn_token_has_its_own_logprobs(engine):
    one = made(redraw=True)
    one.add(chunk("a", max_tokens=2), 1.0)
    closing(engine, one, 11)
    engine.script = [[out("a", 1, 2, reason="length")], [redrawn(engine, one, 2)]]
    record, rpc = -0.75, engine.collective_rpc

    def collective_rpc(method, args=()):
        engine.token_logprob = record if method == "take_record" and "redraw" in args[0] else -0.5
        return rpc(method, args)

    engine.collective_rpc = collective_rpc
    ((_, result),) = one.step()
    assert result.logprobs.tolist() == [-0.5, -0.75]


def test_a_redraw_without_room_ends_no_other_chunk_silently(engine):
    one = made(redraw=True)
    one.add(chunk("a"), 1.0)
    closing(engine, one, 10)
    engine.script = [[out("a", 1)], *[[] for _ in range(20)]]
    with pytest.raises(RuntimeError, match="redraw 0 of a: no room for 10 tokens"):
        one._step()
    assert len(engine.script) == 20 - (10 // 8 + redraws.IDLE_STEPS)


# ---- steps that raise -----------------------------------------------------------------------------------


def test_a_chunk_that_makes_steps_raise_ends_alone_and_the_others_go_on_with_their_tokens(engine):
    one = made()
    one.add(chunk("a"), 1.0)
    one.add(chunk("b"), 1.0)
    engine.requests[0][5].num_preemptions = 2
    assert run(one, engine, [out("a", 1), out("b", 5)]) == []
    fault = RuntimeError("a kernel\nfailed")
    assert run(one, engine, fault) == [] and one._requests.aborted == ["a/0", "b/1"]
    probe = StepOutput("redraw 0 of probe", [1], "length", None)
    ((name, error),) = run(one, engine, fault, [probe])
    assert name == "a" and isinstance(error, RequestRefused)
    assert str(error) == "chunk a: an engine's step fails with it: RuntimeError: failed"
    ((name, result),) = run(one, engine, [out("b", 6, reason="length")])
    assert name == "b" and result.token_ids.tolist() == [5, 6]
    again = [request[:3] for request in engine.requests if request[0] == "b"][-1]
    assert again == ("b", [*range(10, 20), 5], 8), "from its tokens so far"
    assert one.stats().preemptions == 2 and not one.busy


def test_an_engine_whose_healthy_request_fails_too_raises(engine):
    one = made()
    one.add(chunk("a"), 1.0)
    run(one, engine, RuntimeError("first"))
    engine.script = [RuntimeError("second"), RuntimeError("the probe")]
    with pytest.raises(RuntimeError, match="second"):
        one.step()


def test_an_idle_engine_may_raise_once(engine):
    one = made()
    assert run(one, engine, RuntimeError("once"), [], RuntimeError("again")) == []
    engine.script = [RuntimeError("twice")]
    with pytest.raises(RuntimeError, match="twice"):
        one.step()


def test_a_raising_step_with_a_pool_saves_nothing_of_it(engine, monkeypatch):
    one = made(pool=True)
    one._pool.begin_again = set
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.finished_recving_kv_req_ids = set()
    one.add(chunk("a"), 1.0)
    run(one, engine, RuntimeError("once"))
    assert one._pool.forgone == ["a/0"] and one._pool.forgotten == ["a/0"] and one._requests.aborted == ["a/0"]
    run(one, engine, [out("a", 1, reason="length")])
    methods = [method for method, *_ in engine.calls]
    assert methods.index("drop_answers") < methods.index("begin_again")
    assert engine.requests[-1][3] == redraws.NO_POOL, "the chunk has no plan"
    assert one._pool.saving[-1][0] == "a"
