"""An engine's drafts with a draft model at the other end of a line: what has come is proposed, and only a sample that
takes turns waits."""

import pytest
import zmq
from test_drafter_wire import Drafter
from test_drafts import ANSWER, PROMPT, Engine

from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.drafter.config import DrafterConfig
from tailrace.deployments.drafter.wire import Confirm, Guess
from tailrace.deployments.drafting.drafts import EngineDrafts
from tailrace.deployments.messages.context import Source
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.deployments.vllm_exact.pause import is_paused
from tailrace.policies.protocol.actions import DraftMode


@pytest.fixture(params=["group", "model"])
def ends(request):
    """An engine that drafts, and the drafter that it talks to."""
    with zmq.Context() as context:
        other, model = Drafter(context), Drafters(DrafterConfig(model="m"))
        model.meet([other.address])
        drafts = EngineDrafts(DraftConfig(method=request.param, draft_tokens=16), 4096, None, model)
        yield Engine(drafts), other
        drafts.stop()
        other.socket.close()


def came(engine: Engine, chunk_id: str) -> None:
    """Returns when a guess has come."""
    while not len(engine.drafts._model.proposal(chunk_id).tokens):
        engine.drafts._model.exchange()


def test_what_the_model_has_sent_is_verified_and_counted_as_its_own(ends):
    """And no more of it than a window: what is behind waits for the next step."""
    engine, other = ends
    engine.drafts._model._config = DrafterConfig(model="m", window=5)
    chunk_id = engine.start(0, 0, 60)
    engine.step()
    wish, *_ = other.hear()
    assert (wish.tokens.tolist(), wish.end) == ([*PROMPT.tolist(), ANSWER[0]], len(PROMPT) + 59)
    other.say(Guess(wish.name, len(PROMPT) + 1, [*ANSWER[1:6], 7, 8], 9, 5))
    came(engine, chunk_id)
    assert engine.step()[chunk_id] == [], "nothing had come when it was proposed for"
    assert other.hear() == [Confirm(wish.name, len(PROMPT) + 1, ANSWER[1:2])]
    assert engine.step()[chunk_id] == [*ANSWER[2:6], 7]
    report = engine.end(chunk_id)
    assert (report.drafted[Source.MODEL], report.accepted[Source.MODEL]) == (5, 4)
    assert (report.model_tested, report.model_accepted) == (9, 5), "as the drafter counts, overtaken ones included"


def test_a_sample_that_takes_turns_sits_out_until_its_window_has_come(ends):
    engine, other = ends
    engine.drafts._model._config = DrafterConfig(model="m", mode="coupled")
    chunk_id = engine.start(0, 0, 60)
    request, _ = engine.requests[chunk_id]
    engine.step()
    assert is_paused(request)
    wish, *_ = other.hear()
    assert DraftMode(wish.window, wish.coupled) == DraftMode(4, True)
    other.say(Guess(wish.name, len(PROMPT) + 1, ANSWER[1:5], 0, 0))
    came(engine, chunk_id)
    engine.drafts.propose()
    assert not is_paused(request) and request.spec_token_ids == ANSWER[1:5]


def test_a_drafter_that_goes_leaves_nobody_waiting(ends):
    engine, _ = ends
    engine.drafts._model._config = DrafterConfig(model="m", mode="coupled")
    chunk_id = engine.start(0, 0, 60)
    request, _ = engine.requests[chunk_id]
    engine.step()
    assert is_paused(request)
    engine.drafts._model.meet([])
    engine.drafts.propose()
    assert not is_paused(request)


@pytest.mark.parametrize("method", ["ngram", "history", "group"])
def test_a_copy_that_drafts_from_the_index_asks_no_drafter_and_waits_for_none(ends, method):
    engine, other = ends
    engine.drafts._model._config = DrafterConfig(model="m", mode="coupled")
    copy, original = engine.start(1, 0, 60, method=method), engine.start(0, 0, 60)
    request, _ = engine.requests[copy]
    for _ in range(3):
        engine.step()
        assert not is_paused(request)
    assert {message.name.split()[0] for message in other.hear()} == {original}


def test_an_engine_drafts_by_a_model_first_while_it_reaches_one(ends):
    engine, _ = ends
    indexed = engine.drafts.methods
    engine.start(0, 0, 60)
    engine.step()
    assert engine.drafts.methods == ("model", *indexed)
    engine.drafts._model.meet([])
    engine.step()
    assert engine.drafts.methods == indexed
