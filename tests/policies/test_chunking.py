"""Where chunks end: never beyond what was asked for, and with `block_tokens` behind whole KV blocks."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.chunking import FixedChunks
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import StartChunk
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


# ---- chunks that nobody waits for --------------------------------------------------------------------


def lengths(core: RolloutCore, rounds: int) -> list[list[int]]:
    """Lengths of the chunks that start in each round; then all of them end."""
    found = []
    for number in range(rounds):
        starts = [action for action in core.decide(ev.Tick(float(number))) if isinstance(action, StartChunk)]
        found.append([one.max_tokens for one in starts])
        for one in starts:
            core.observe(ev.ChunkFinished(float(number), one.chunk_id, one.max_tokens, ev.ChunkEnd.LENGTH, 0))
    return found


def core_with(blocks: int, *groups: ev.GroupSpec, running: int = 1, **policies) -> RolloutCore:
    """One replica with so many blocks of 10 tokens, and chunks of 100 tokens that stretch to 400."""
    core = RolloutCore(Policies(chunking={"type": "fixed", "chunk_tokens": 100, "stretch": 4}, **policies))
    core.observe(ev.ReplicaJoined(0.0, "a", 10, blocks, running, 0, 0))
    core.observe(ev.SamplesSubmitted(0.0, "s", groups))
    return core


def test_a_chunk_is_longer_while_nobody_waits_for_its_end():
    one, two = ev.GroupSpec("g", 50, 1, 1_000), ev.GroupSpec("h", 50, 1, 1_000)
    assert lengths(core_with(400, one), 4) == [[100], [400], [400], [100]]
    assert lengths(core_with(400, one, two), 3) == [[100]] * 3, "the other one waits for the place"
    assert lengths(core_with(105, one), 3) == [[100]] * 3, "twice the room is not there"
    assert lengths(core_with(400, ev.GroupSpec("g", 50, 1, 1_000, chunk_tokens=100)), 3) == [[100]] * 3, "it is read"
