"""What a drafting policy sees of one step's chunks and their proposals. Called by `EngineDrafts`."""

import numpy as np

from tailrace.deployments.drafting.drafted_tokens import DraftedTokens
from tailrace.deployments.drafting.proposal_batch import ProposalBatch
from tailrace.policies.protocol.step_cost import StepCost
from tailrace.policies.protocol.views import DraftView


def view_of(fresh: list[DraftedTokens], batch: ProposalBatch, cost: StepCost, acceptance: float) -> DraftView:
    """Returns the view of these chunks, in the order of the batch. `acceptance`: of all drafts here."""
    plans = [drafted.chunk.draft for drafted in fresh]

    def column(values: list, kind=np.int32):
        return np.array(values, kind)

    return DraftView(
        right=batch.right[:, : max(1, batch.lengths.max())],
        proposed=batch.lengths,
        match_tokens=batch.match_tokens,
        slot=column([d.slot for d in fresh], np.int64),
        verifications=column([d.verifications - 1 for d in fresh], np.int64),
        drafted_last=column([len(d.draft) for d in fresh]),
        accepted_last=column([d.accepted for d in fresh]),
        generated=column([d.generated for d in fresh]),
        expected=column([plan.expected_tokens for plan in plans]),
        medium_at=column([plan.class_starts[0] for plan in plans]),
        long_at=column([plan.class_starts[1] for plan in plans]),
        acceptance=acceptance,
        cost=cost,
    )
