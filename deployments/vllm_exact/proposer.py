"""The proposer that vLLM builds when Tailrace drafts: it proposes nothing.

Tailrace makes drafts next to vLLM's scheduler (`drafts.py`): only there samples have names and groups have indexes.
The scheduler's output takes the drafts to all tensor-parallel ranks, so the ranks need no agreement.
vLLM verifies no drafts without such a class. Loaded by vLLM, by dotted path.
"""


class NoDrafts:
    """vLLM's `custom_class` proposer."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, *_args, **_kwargs) -> None:
        """Loads nothing: there is no model."""

    def propose(self, sampled_token_ids: list[list[int]], *_args, **_kwargs) -> list[list[int]]:
        """Returns one empty draft for each request of the step."""
        return [[] for _ in sampled_token_ids]
