"""An engine's drafts with a draft model at the other end of a line: what has come is proposed, and only a sample that
takes turns waits."""

import numpy as np
import pytest
import zmq
from test_drafter_wire import Drafter
from test_drafts import ANSWER, PROMPT, Engine

from tailrace.deployments.draft_index.proposal import NOTHING, Proposal
from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.drafter.wire import Confirm, Guess, Open
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


def opened(other: Drafter, chunk_id: str) -> Open:
    """Returns the chunk's wish, which comes after messages of other chunks."""
    while True:
        for message in other.hear():
            if isinstance(message, Open) and message.name.startswith(chunk_id):
                return message


def path(tokens: list[int], *right: float, source: Source = Source.MODEL) -> Proposal:
    return Proposal(np.array(tokens, np.int32), np.array(right, np.float32), np.full(len(tokens), source, np.uint8), 0)


def test_two_proposals_are_one_tree_whose_best_path_is_taken():
    model, index = path([1, 2, 3], 0.6, 0.6, 0.6), path([1, 5, 6], 0.9, 0.5, 0.1, source=Source.MATE)
    best = model.joined(index)
    assert (best.tokens.tolist(), best.sources.tolist()) == ([1, 2, 3], [Source.MODEL] * 3)
    assert best.right.tolist() == pytest.approx([0.9, 0.6, 0.6]), "both propose the first"
    surer = index._replace(right=np.array([0.9, 0.9, 0.9], np.float32))
    best = model.joined(surer)
    assert (best.tokens.tolist(), best.sources.tolist()) == ([1, 5, 6], [Source.MODEL, Source.MATE, Source.MATE])
    longer = path([1, 2, 3, 4], 0.5, 0.5, 0.5, 0.2, source=Source.MATE)
    assert model.joined(longer).tokens.tolist() == longer.joined(model).tokens.tolist() == [1, 2, 3, 4]
    assert model.joined(NOTHING).tokens.tolist() == NOTHING.joined(model).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ends", ["group"], indirect=True)
@pytest.mark.parametrize("method", [None, "model"])
def test_where_the_index_is_surer_than_the_model_its_tokens_are_verified(ends, method):
    """Unless the chunk is a copy that drafts by the model."""
    engine, other = ends
    mate = engine.start(1, 0, 60)
    while mate in engine.requests:
        engine.step()
    chunk_id = engine.start(0, 20, 40, method=method)
    engine.step()
    wish = opened(other, chunk_id)
    other.say(Guess(wish.name, len(PROMPT) + 21, [*ANSWER[21:30], 7, 8, 9, 10], 40, 4))
    came(engine, chunk_id)
    assert engine.step()[chunk_id] == ANSWER[21:29], "the index knows them from the mate"
    assert engine.step()[chunk_id] == (ANSWER[30:38] if method is None else [7, 8, 9, 10])
