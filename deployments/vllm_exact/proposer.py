"""The proposer that vLLM builds when Tailrace drafts: it proposes nothing.

Drafts are made beside vLLM's scheduler (`drafts.py`), because only there samples have names and everything that is
known of their groups is at hand; they travel to all tensor-parallel ranks in the scheduler's output, so the ranks need
not agree on anything. What vLLM needs this class for is to verify drafts at all. Loaded by vLLM, by dotted path.
"""


class NoDrafts:
    """vLLM's `custom_class` proposer."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, *_args, **_kwargs) -> None:
        """There is no model."""

    def propose(self, sampled_token_ids: list[list[int]], *_args, **_kwargs) -> list[list[int]]:
        """One empty draft for each request of the step."""
        return [[] for _ in sampled_token_ids]
