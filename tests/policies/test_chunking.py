"""Where chunks end: never beyond what was asked for, and with `block_tokens` behind whole KV blocks."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.policies.families.chunking import FixedChunks
from tailrace.policies.families.registry import Policies
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
