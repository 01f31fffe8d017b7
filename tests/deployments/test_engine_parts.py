"""Parts of the engine around vLLM, over scripted ones: chunks, weights and sleep, warm-up, and the engine's thread."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_line_frames import CHUNK

from tailrace.deployments.engine import engine_chunk, engine_weights, runner, warmup
from tailrace.deployments.engine.engine_chunk import EngineChunk, never_begun, prompt_logprobs, tokens_to_verify
from tailrace.deployments.engine.engine_weights import EngineWeights
from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import KV_CACHE, TAGS, WEIGHTS, KvPlan, WeightsRead
from tailrace.deployments.messages.command import ResetCache
from tailrace.deployments.messages.errors import EngineDown, RequestRefused
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.deployments.messages.scores import BROKEN
from tailrace.deployments.vllm_exact.logprob_store import DrawRecord
from tailrace.deployments.vllm_exact.pause import pause
from tailrace.policies.protocol.events import ChunkEnd

PROMPT = np.arange(10, 20, dtype=np.int32)


def chunk_of(**fields):
    plain = {"token_ids": PROMPT, "prompt_tokens": 6, "max_tokens": 9, "sampling": SamplingParams(), "turn_start": 0}
    return replace(CHUNK, **plain | fields)


def running(chunk=None, **fields) -> EngineChunk:
    request = SimpleNamespace(next_decode_eligible_step=0, spec_token_ids=[])
    return EngineChunk(chunk or chunk_of(), "r", request, 1.0, **fields)


def record_of(*margins: float, logprobs=None, raw=None) -> DrawRecord:
    own = np.array([-0.5] * len(margins) if logprobs is None else logprobs, np.float32)
    base = np.array([-0.25] * len(margins) if raw is None else raw, np.float32)
    return DrawRecord(own, base, np.array(margins, np.float32), 5, 3, (((1, -0.5),),), ((1, 2),))


# ---- a chunk --------------------------------------------------------------------------------------------


def test_a_chunk_s_answer_begins_after_its_prompt_and_grows_by_its_steps():
    one = running()
    assert one.answer() == [16, 17, 18, 19]
    one.take([1, 2])
    one.take([3])
    assert one.answer() == [16, 17, 18, 19, 1, 2, 3] and one.verifications == 2
    assert one.context().dtype == np.int32 and one.context().tolist() == [*range(10, 20), 1, 2, 3]


def test_a_result_has_the_times_between_its_marks_and_close_calls_below_the_tolerance(monkeypatch):
    monkeypatch.setattr(engine_chunk, "time", SimpleNamespace(monotonic=lambda: 9.0))
    one = running(scheduled_s=2.0, first_token_s=4.0, cached_tokens=7)
    one.take([1, 2, 3])
    one.prompt_logprobs = "of the prompt"
    found = one.result(ChunkEnd.LENGTH, record_of(0.5, 0.25, 0.125), 0.25, None)
    assert (found.queue_s, found.prefill_s, found.decode_s) == (1.0, 2.0, 5.0)
    assert (found.cached_tokens, found.computed_tokens, found.verifications) == (7, 3, 1)
    assert found.close_calls == (2,), "one at the tolerance is none"
    assert found.token_ids.dtype == np.int32 and found.token_ids.tolist() == [1, 2, 3]
    assert found.logprobs.tolist() == [-0.5] * 3 and found.raw_logprobs.tolist() == [-0.25] * 3
    assert (found.chunk_id, found.end, found.weights_version) == (CHUNK.chunk_id, ChunkEnd.LENGTH, 4)
    assert (found.drafted_tokens, found.accepted_tokens, found.drafts) == (5, 3, None)
    assert (found.top_logprobs, found.sampling_mask) == ((((1, -0.5),),), ((1, 2),))
    assert found.prompt_logprobs == "of the prompt"


def test_a_chunk_that_never_began_waited_all_the_time(monkeypatch):
    monkeypatch.setattr(engine_chunk, "time", SimpleNamespace(monotonic=lambda: 9.0))
    found = never_begun(chunk_of(), 4.0)
    assert (found.end, found.queue_s, found.prefill_s, found.decode_s) == (ChunkEnd.ABORTED, 5.0, 0.0, 0.0)
    assert found.computed_tokens == found.cached_tokens == len(found.token_ids) == 0 and found.close_calls == ()


def test_the_first_tokens_are_noted_once_and_the_prompt_is_scored_where_it_is_asked(monkeypatch):
    monkeypatch.setattr(engine_chunk, "prompt_logprobs", lambda flat: f"of {flat}")
    output = SimpleNamespace(num_cached_tokens=5, prompt_logprobs="prompt")
    one = running()
    one.has_tokens(3.0, output)
    one.has_tokens(4.0, SimpleNamespace(num_cached_tokens=6))
    assert (one.first_token_s, one.cached_tokens, one.prompt_logprobs) == (3.0, 5, None)
    scored = running(chunk_of(sampling=SamplingParams(prompt_logprobs=0), prompt_tokens=10))
    scored.has_tokens(3.0, output)
    assert scored.prompt_logprobs == "of prompt"
    later = running(chunk_of(sampling=SamplingParams(prompt_logprobs=0), prompt_tokens=6))
    later.has_tokens(3.0, output)
    assert later.prompt_logprobs is None, "its sample's first chunk has them"


def text_of(token_ids) -> str:
    return "".join(map(chr, token_ids))


def letters(text: str) -> list[int]:
    return list(map(ord, text))


def test_tokens_after_a_stop_text_are_cut_and_a_stop_in_the_prompt_is_none():
    stops = SamplingParams(stop=("END",))
    before = np.array(letters("END...EN"), np.int32)
    one = running(chunk_of(token_ids=before, prompt_tokens=6, sampling=stops))
    assert one.until_stop(letters("D!"), text_of) == (letters("D"), True)
    assert one.until_stop(letters("d!"), text_of) == (letters("d!"), False)
    assert one.until_stop([], text_of) == ([], False)
    one.take(letters("D"))
    assert one.until_stop(letters("x"), text_of) == (letters("x"), False), "an earlier one was not taken for a stop"
    turn = running(chunk_of(token_ids=before, prompt_tokens=6, sampling=stops, turn_start=8))
    assert turn.until_stop(letters("D!"), text_of) == (letters("D!"), False), "it began in the turn before"
    assert running(chunk_of(sampling=SamplingParams())).until_stop(letters("END"), text_of) == (letters("END"), False)


def test_a_token_of_no_distribution_is_the_model_s_fault_or_the_request_s():
    one = running()
    assert one.fault(record_of(1.0, 1.0)) is None and one.fault(DrawRecord.none()) is None
    nan = float("nan")
    broken = one.fault(record_of(1.0, 1.0, 1.0, logprobs=[-1, nan, nan], raw=[-1, nan, nan]))
    assert type(broken) is RuntimeError
    assert str(broken) == f"chunk {CHUNK.chunk_id}: answer position 5: the model's logits are no numbers"
    refused = one.fault(record_of(1.0, 1.0, logprobs=[-1, nan], raw=[-1, -2]))
    assert type(refused) is RequestRefused and "answer position 5: no token is left; allowed_token_ids" in str(refused)


def test_kv_is_kept_past_a_stop_where_the_sample_has_another_turn():
    assert not running(chunk_of(kv=None)).keeps_kv and not running(chunk_of(kv=KvPlan(4))).keeps_kv
    assert running(chunk_of(kv=KvPlan(4, save_stopped=True))).keeps_kv


def test_the_tokens_of_a_step_are_known_where_every_chunk_decodes():
    first, second, paused, out = (running(first_token_s=1.0) for _ in range(4))
    second.request.spec_token_ids = [1, 2, 3]
    paused.request.spec_token_ids = [1]
    pause(paused.request)
    out.is_out, out.first_token_s = True, None
    assert tokens_to_verify([first, second, paused, out]) == 5
    assert tokens_to_verify([first, running(), second]) == 0, "one reads its prompt"
    assert tokens_to_verify([]) == 0


def test_logprobs_of_a_prompt_are_of_its_own_tokens_and_the_likeliest_others():
    flat = SimpleNamespace(
        start_indices=[0, 0, 1, 4],
        end_indices=[0, 1, 4, 6],
        token_ids=[5, 7, 8, 9, 3, 2],
        logprobs=[-1.0, -2.0, -0.5, -0.75, -3.0, -0.25],
        ranks=[1, 4, 1, 2, 9, 1],
    )
    found = prompt_logprobs(flat)
    assert found.logprobs == (-1.0, -2.0, -3.0) and found.ranks == (1, 4, 9)
    assert found.top == ((), ((8, -0.5), (9, -0.75)), ((2, -0.25),))
    for name in ("end_indices", "logprobs"):
        with pytest.raises(ValueError):
            prompt_logprobs(SimpleNamespace(**vars(flat) | {name: getattr(flat, name)[:-1]}))


# ---- weights --------------------------------------------------------------------------------------------


class Workers:
    """vLLM's engine with our workers. `folders`: the digest of each folder's content; changed by a test."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="/model"))
        core = SimpleNamespace(reset_encoder_cache=lambda: self.calls.append(("reset_encoder_cache",)))
        self.engine_core = SimpleNamespace(engine_core=core)
        self.folders, self.refusals, self.calls, self.on_load = {"/model": "d0", "/w1": "d1"}, [None, None], [], None

    def collective_rpc(self, method: str, args: tuple = ()):
        if method == "attempt":
            return [(answer, None) for answer in self.collective_rpc(args[0], args[1:])]
        self.calls.append((method, *args))
        if method == "load_weights_from" and self.on_load:
            self.on_load()
        answers = {
            "unlike_weights": [["a"], ["b"]],
            "weight_checksums": [{"a": "c"}],
            "transfer_weights": ["source", ""],
        }
        return self.refusals if method == "weights_refusal" else answers.get(method, [None, None])

    def done(self) -> list[tuple]:
        done, self.calls = [call for call in self.calls if call[0] != "weights_refusal"], []
        return done


@pytest.fixture
def workers(monkeypatch) -> Workers:
    workers = Workers()
    monkeypatch.setattr(engine_weights, "weights_digest", lambda folder: workers.folders[folder])
    return workers


def test_a_load_names_the_weights_and_an_empty_source_is_the_first_folder(workers):
    weights = EngineWeights(workers, 3)
    start = {"weights_version": 3, "weights_source": "", "weights_digest": "d0", "asleep": ()}
    start |= {"score": (), "score_drift": 0.0}
    assert weights.report() == start
    weights.load(4, "/w1", "d1")
    assert workers.done() == [("load_weights_from", "/w1"), ("reset_encoder_cache",)]
    assert weights.report() == start | {"weights_version": 4, "weights_source": "/w1", "weights_digest": "d1"}
    weights.load(5, "", "")
    assert workers.done()[0] == ("load_weights_from", "/model")
    assert weights.report() == start | {"weights_version": 5}


@pytest.mark.parametrize(
    ("refusals", "digest", "words"),
    [
        ([None, "rank 1 has no room"], "d1", "^rank 1 has no room$"),
        ([None, None], "d9", r"^weights folder /w1: holds other weights \(d1\) than version 4 \(d9\)$"),
    ],
)
def test_a_refused_load_changes_nothing(workers, refusals, digest, words):
    weights, workers.refusals = EngineWeights(workers, 3), refusals
    before = weights.report()
    with pytest.raises(ValueError, match=words):
        weights.load(4, "/w1", digest)
    assert workers.done() == [] and weights.report() == before


def test_a_folder_that_is_written_to_while_it_is_loaded_breaks_the_engine(workers):
    weights = EngineWeights(workers, 3)
    workers.on_load = lambda: workers.folders.update({"/w1": "d2"})
    with pytest.raises(RuntimeError, match="/w1: it was written to while it was loaded"):
        weights.load(4, "/w1", "")
    assert weights.report()["weights_version"] == 3


@pytest.mark.parametrize("after", [False, True], ids=["in the load", "after the load"])
@pytest.mark.parametrize("asleep", [False, True])
def test_a_folder_that_is_gone_once_a_load_has_begun_is_no_refusal(workers, monkeypatch, asleep, after):
    weights = EngineWeights(workers, 3)
    if asleep:
        weights.fall_asleep()

    def remove():
        del workers.folders["/w1"]
        if not after:
            raise ValueError("weights folder /w1: no such folder")

    def digest(folder):
        if folder not in workers.folders:
            raise ValueError(f"weights folder {folder}: no such folder")
        return workers.folders[folder]

    monkeypatch.setattr(engine_weights, "weights_digest", digest)
    workers.on_load = remove
    with pytest.raises(RuntimeError, match="/w1: its load broke off: weights folder /w1: no such folder"):
        weights.load(4, "/w1", "d1")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weights_version": 3, "weights_digest": ""}, None),
        ({"weights_version": 3, "weights_digest": "d0"}, None),
        ({"weights_version": 3, "weights_digest": "d1"}, "wants weights d1, this is d0"),
        ({"weights_version": 4, "weights_digest": "d0"}, "wants weights version 4, this is 3"),
    ],
)
def test_a_chunk_of_other_weights_cannot_run(workers, fields, reason):
    weights = EngineWeights(workers, 3)
    assert weights.chunk_refusal(chunk_of(**fields)) == reason
    weights.fall_asleep()
    assert weights.chunk_refusal(chunk_of(**fields)) == "this engine sleeps"


def test_a_sleeping_engine_wakes_its_weights_by_a_load_and_its_kv_by_itself_once(workers):
    weights = EngineWeights(workers, 3)
    weights.wake_kv()
    assert workers.done() == [] and weights.asleep == ()
    weights.fall_asleep()
    weights.fall_asleep()
    assert workers.done() == [("fall_asleep",)] and weights.report()["asleep"] == TAGS
    with pytest.raises(ValueError, match="the engine sleeps; wake it up first"):
        weights.read_back()
    weights.load(3, "", "d0")
    assert workers.done() == [("wake", WEIGHTS), ("load_weights_from", "/model"), ("reset_encoder_cache",)]
    assert weights.asleep == (KV_CACHE,)
    weights.wake_kv()
    weights.wake_kv()
    assert workers.done() == [("wake", KV_CACHE)] and weights.asleep == ()
    weights.load(4, "/w1", "")
    weights.fall_asleep()
    assert workers.done()[-1] == ("fall_asleep",), "it sleeps again"


def test_memory_that_is_not_to_be_had_leaves_an_engine_asleep_until_a_further_wake_up(workers):
    """While a trainer had the GPU's memory, a wake-up of the weights ended the engine."""
    weights, alone, attempts = EngineWeights(workers, 3), workers.collective_rpc, [(None, None), (None, "no memory")]
    weights.fall_asleep()
    workers.done()
    workers.collective_rpc = lambda method, args=(): attempts if args[:1] == ("wake",) else alone(method, args)
    for wake in (lambda: weights.load(4, "/w1", "d1"), weights.wake_kv):
        with pytest.raises(ValueError, match=r"^no memory$"):
            wake()
    assert workers.done() == [] and weights.asleep == TAGS and weights.version == 3
    workers.collective_rpc = alone
    weights.load(4, "/w1", "d1")
    weights.wake_kv()
    assert weights.asleep == () and weights.version == 4


def test_weights_that_could_not_come_back_do_not_go(workers):
    weights = EngineWeights(workers, 3)
    weights.load(4, "/w1", "")
    workers.done()
    workers.folders["/w1"] = "d2"
    with pytest.raises(ValueError, match=r"/w1: holds other weights now \(d2\) than run \(d1\), which could not come"):
        weights.fall_asleep()
    workers.folders["/w1"], workers.refusals = "d1", ["no folder", None]
    with pytest.raises(ValueError, match="no folder; the weights could not come back"):
        weights.fall_asleep()
    assert weights.asleep == () and workers.done() == []


def test_weights_are_read_back_and_compared_with_a_folder_that_still_has_them(workers):
    weights = EngineWeights(workers, 3)
    weights.load(4, "/w1", "")
    assert weights.read_back() == WeightsRead(4, "d1", {"a": "c"}, ("a",), "")
    assert ("unlike_weights", "/w1") in workers.done()
    workers.folders["/w1"] = "d2"
    read = weights.read_back()
    assert (read.unlike, read.problem) == (None, "weights folder /w1: holds other weights now")
    assert workers.done() == [("weight_checksums",)]
    assert weights.transfer("a phase") == "source" and workers.done() == [("transfer_weights", "a phase")]


class ScoredSteps:
    """An idle stepper whose chunk ends with these logprobs, or an error. `refused`: it takes none."""

    def __init__(self, logprobs, refused: bool = False):
        self.logprobs, self.refused, self.added = logprobs, refused, []

    def stats(self):
        return SimpleNamespace(weights_version=3)

    def add(self, chunk, submitted_s: float) -> None:
        if self.refused:
            raise RequestRefused("context of 32 tokens, max_model_len is 16")
        self.added.append(chunk)

    def step(self) -> list:
        (chunk,) = self.added
        if isinstance(self.logprobs, Exception):
            return [(chunk.chunk_id, self.logprobs)]
        return [(chunk.chunk_id, SimpleNamespace(prompt_logprobs=SimpleNamespace(logprobs=self.logprobs)))]


def test_weights_are_scored_unless_they_sleep_and_changed_ones_have_drifted(workers):
    weights, sound = EngineWeights(workers, 3), [-1.5] * 31
    weights.score_again(None)  # nothing to compare with
    weights.score(ScoredSteps(sound))
    assert weights.report()["score"] == tuple(sound) and weights.report()["score_drift"] == 0.0
    weights.score_again(ScoredSteps([-1.0] * 31))
    assert weights.report()["score_drift"] == 0.5
    weights.score(ScoredSteps([float("nan")] * 31))
    assert weights.report()["score"] == (BROKEN,) * 31
    weights.score(ScoredSteps(RuntimeError("the model's logits are no numbers")))
    assert weights.report()["score"] == (BROKEN,) * 31
    weights.score(ScoredSteps(sound, refused=True))
    assert weights.report()["score"] == ()
    weights.fall_asleep()
    weights.score(None)
    assert weights.report()["score"] == ()


# ---- warm-up --------------------------------------------------------------------------------------------


class Rehearsed:
    """A stepper whose chunks take two steps. Notes the chunks of each, and the drafts of each step."""

    def __init__(self, max_model_len: int = 4096):
        self.added, self.drafts, self.steps, self._left = [], [], 0, 0
        self.weights, self.scored, self._max_model_len = self, 0, max_model_len

    @property
    def busy(self) -> bool:
        return self._left > 0

    def stats(self):
        return SimpleNamespace(weights_version=4, max_model_len=self._max_model_len)

    def add(self, chunk, submitted_s: float) -> None:
        self.added.append(chunk)
        self._left = 2

    def step(self) -> None:
        self.steps += 1
        self._left -= 1

    def draft_for_all(self, drafts: list[int]) -> None:
        self.drafts.append(drafts)

    def score(self, steps) -> None:
        self.scored += 1


def test_an_engine_is_warmed_up_by_two_prompts_and_by_drafts_only_where_it_drafts():
    plain = Rehearsed()
    warmup.warm_up(plain, 8, 0)
    assert [len(chunk.token_ids) for chunk in plain.added] == list(warmup.CONTEXT_TOKENS) and plain.drafts == []
    assert plain.steps == 4 and plain.scored == 1
    chunk = plain.added[1]
    assert chunk.token_ids.dtype == np.int32 and set(chunk.token_ids[1:].tolist()) == {warmup.WRONG}
    assert chunk.token_ids[0] == 0 and chunk.prompt_tokens == 192 and chunk.weights_version == 4
    assert chunk.forced.tolist() == [warmup.ANSWER] * chunk.max_tokens == [warmup.ANSWER] * 2
    assert warmup.chunk_of("n", 3, 1, first_token=7).token_ids.tolist() == [7, 2, 2]
    drafting = Rehearsed()
    warmup.warm_up(drafting, 3, 5)
    rehearsed = [chunk.chunk_id for chunk in drafting.added[2:]]
    assert rehearsed == ["rehearsal-0"] * 5 + ["rehearsal-0", "rehearsal-1", "rehearsal-2"] * 3
    lengths = [len(drafts) for drafts in drafting.drafts]
    assert lengths == [length for drafts in (0, 1, 3, 5, 5, 3, 5, 5) for length in (drafts, drafts)]
    assert {token for drafts in drafting.drafts for token in drafts} == {warmup.WRONG}
    assert all(chunk.max_tokens == warmup.STEPS + 1 for chunk in drafting.added[2:])


@pytest.mark.parametrize(("max_model_len", "contexts"), [(16, [8, 14]), (192, [8, 190]), (194, [8, 192])])
def test_the_chunks_of_a_warm_up_fit_into_a_short_context(max_model_len, contexts):
    """An engine with a `max_model_len` up to 192 never started: it refused its own chunk."""
    short = Rehearsed(max_model_len)
    warmup.warm_up(short, 8, 5)
    assert [len(chunk.token_ids) for chunk in short.added[:2]] == contexts
    assert all(len(chunk.token_ids) + chunk.max_tokens <= max_model_len for chunk in short.added)


# ---- the engine's thread --------------------------------------------------------------------------------


class Idle:
    """A stepper that has nothing to do. `closed`: how often it was closed."""

    made: tuple = ()
    busy = False

    def __init__(self, *given):
        Idle.made = given
        self.closes = 0

    def stats(self):
        return SimpleNamespace(replica_id="r", weights_version=0, weights_digest="", asleep=())

    def reset_cache(self) -> bool:
        return True

    def close(self) -> None:
        self.closes += 1


def test_an_engine_runs_on_its_own_thread_until_it_is_stopped(monkeypatch):
    monkeypatch.setattr(runner, "Stepper", Idle)
    engine = EngineRunner("config", "r", 3, 1, "pool", "feed", "model")
    assert Idle.made == ("config", "r", 3, 1, "pool", "feed", "model") and engine.healthy
    assert engine.ask(ResetCache()).result(10) is True
    thread, engine._thread = engine._thread, SimpleNamespace(is_alive=lambda: False)
    assert not engine.healthy, "its thread has died"
    engine._thread = thread
    engine.stop()
    assert not engine.healthy and not engine._thread.is_alive() and engine._stepper.closes == 1
    answers = []
    engine.submit(chunk_of(), answers.append)
    assert isinstance(answers[0], EngineDown) and "stopped" in engine.problem


def test_an_engine_that_does_not_start_raises_the_reason(monkeypatch):
    def broken(*given):
        raise ValueError("no such model")

    monkeypatch.setattr(runner, "Stepper", broken)
    with pytest.raises(ValueError, match="no such model"):
        EngineRunner("config", "r")
