"""Tailrace's samples as verl's `TokenOutput`.

Invariant: one log probability per token, or none at all. Called by the server.
"""

import numpy as np
from verl.workers.rollout.replica import TokenOutput

from tailrace.deployments.messages.rollout import SampleResult
from tailrace.policies.protocol.actions import SampleEnd
from tailrace_verl.global_steps import GlobalSteps


class SampleFailed(RuntimeError):
    """The service could not finish the sample. The text is one line."""


def ended(sample: SampleResult) -> SampleResult:
    """The sample itself. Raises SampleFailed."""
    if sample.finish_reason not in (SampleEnd.STOP, SampleEnd.LENGTH):
        raise SampleFailed(f"sample ended as {sample.finish_reason.value}: {sample.error or 'no reason given'}")
    return sample


def reply(
    sample: SampleResult, steps: GlobalSteps, logprobs: bool, keyed_by: str, routes: np.ndarray | None = None
) -> TokenOutput:
    """`logprobs`: wanted; they are under the sampling distribution, verl's `processed_logprobs`. `routes`: see
    `tailrace_verl.routes`.

    `global_steps` is the step of the newest weights in the sample.
    """
    made_under = [steps.of(segment.weights_version) for segment in sample.segments] or [0]
    return TokenOutput(
        token_ids=list(sample.token_ids),
        log_probs=list(sample.logprobs) if logprobs else None,
        routed_experts=routes,
        stop_reason="completed",
        num_preempted=0,
        extra_fields={
            "global_steps": max(made_under),
            "min_global_steps": min(made_under),
            "max_global_steps": max(made_under),
            "weights_versions": [(one.start, one.end, one.weights_version) for one in sample.segments],
            "tokens_keyed_by": keyed_by,
            "spec_num_draft_tokens": sample.drafted_tokens,
            "spec_num_accepted_tokens": sample.accepted_tokens,
            "spec_num_verify_steps": sample.verifications,
        },
    )
