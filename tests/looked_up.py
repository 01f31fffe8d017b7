"""Drafts of vLLM's n-gram drafter, for tests of engines whose steps verify several tokens."""

from itertools import count

from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.policies.families.drafting import FixedBudget

NUMBERS = count()


def looked_up(tokens: int, shortest: int = 2, **vllm_args) -> dict:
    """The engine settings of drafts of up to this many tokens. `shortest`: tokens of the shortest n-gram."""
    drafter = {"method": "ngram", "num_speculative_tokens": tokens}
    drafter |= {"prompt_lookup_max": 4, "prompt_lookup_min": shortest}
    draft = DraftConfig(method="vllm", draft_tokens=tokens)
    return {"draft": draft, "vllm_args": {"speculative_config": drafter, **vllm_args}}


def drafted(tokens: int) -> DraftPlan:
    """The plan of a chunk of a group of its own that verifies all drafts of up to this many tokens."""
    number = next(NUMBERS)
    return DraftPlan(GroupRef(f"g{number}", f"p{number}"), 0, 0, 64, (0, 0), FixedBudget(tokens=tokens))
