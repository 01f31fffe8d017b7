"""The workload with rules for tokens: rules differ by prompt, so that together the prompts have every kind.

Called by lab/verification/tokens.py.
"""

from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.deployments.messages.sampling import SamplingParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "hobbies": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "hobbies"],
}

RULES = (
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.8, frequency_penalty=0.3, temperature=0.8),
    SamplingParams(stop=("\n\n", ". The"), min_tokens=24),
    SamplingParams(structured_outputs={"json": PERSON}),
    SamplingParams(bad_words=(",", " and"), logit_bias={260: 2.0}, top_p=0.95),
    SamplingParams(structured_outputs={"regex": r"([A-Z][a-z]{2,9} ){20,40}\."}),
    SamplingParams(ignore_eos=True, top_k=40),
)


def ruled(batch: RolloutBatch) -> RolloutBatch:
    """Returns the same prompts and keys, with the rules by turns."""
    groups = (
        group.model_copy(update={"sampling": RULES[number % len(RULES)]}) for number, group in enumerate(batch.groups)
    )
    return batch.model_copy(update={"groups": tuple(groups)})
