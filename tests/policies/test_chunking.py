"""Where chunks end: never beyond what was asked for, and with `block_tokens` behind whole KV blocks."""

from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.chunking import FixedChunks
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.views import SampleView


def sample(prompt_tokens: int, generated: int, max_tokens: int) -> SampleView:
    return SampleView("g#0", "g", 0, 0, prompt_tokens, generated, 0, 0.0, max_tokens, 0, None)


@given(st.integers(1, 500), st.integers(1, 300), st.integers(1, 64), st.integers(1, 400))
def test_chunks_make_all_tokens_and_end_at_blocks_where_they_are_long_enough(prompt, chunk, block, most):
    policy, made = FixedChunks(chunk_tokens=chunk, block_tokens=block), 0
    while made < most:
        tokens = policy.tokens(sample(prompt, made, most))
        assert 1 <= tokens <= min(chunk, most - made)
        made += tokens
        if made < most and chunk >= block:
            assert (prompt + made - 1) % block == 0, "only the token that is not computed yet stands behind a block"
            assert tokens > chunk - block


def test_without_chunks_blocks_do_not_matter():
    assert FixedChunks(chunk_tokens=None, block_tokens=32).tokens(sample(5, 7, 100)) == 93
    assert FixedChunks(chunk_tokens=64).tokens(sample(5, 0, 100)) == 64


def test_configured_chunks_end_with_the_engines_blocks_unless_they_have_a_size_of_their_own():
    assert Policies().sized(32, 0).chunking == FixedChunks(block_tokens=32)
    assert Policies(chunking=FixedChunks(block_tokens=8)).sized(32, 0).chunking.block_tokens == 8
    assert Policies().sized(1, 0) == Policies()


def test_a_planner_counts_the_draft_models_that_the_service_has():
    planned = Policies(draft_models="planned")
    assert planned.sized(1, 3).draft_models.replicas == 3 and planned.sized(1, 0) == planned
    assert Policies().sized(1, 3) == Policies()


class Constant(BaseModel):
    """A chunking of a user's own, which does not look at the sample."""

    model_config = ConfigDict(frozen=True)
    type: str = "constant"

    def tokens(self, sample: SampleView) -> int:
        return 64


def test_a_chunking_that_asks_for_too_much_makes_no_sample_longer_than_it_may_be():
    core, lengths = RolloutCore(Policies(chunking=Constant(), lanes="none")), []
    core.observe(ev.ReplicaJoined(0.0, "r0", 16, 1000, 8, 0, 0))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, 1, 100),)))
    while started := [one for one in core.decide(ev.Tick(0.0)) if hasattr(one, "max_tokens")]:
        lengths.append(started[0].max_tokens)
        core.observe(ev.ChunkFinished(0.0, started[0].chunk_id, lengths[-1], ev.ChunkEnd.LENGTH, 0))
    assert lengths == [64, 36] and core.counts()["batches"] == 0
