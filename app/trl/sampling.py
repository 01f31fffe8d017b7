"""The sampling parameters of a TRL trainer in the service's form."""

from tailrace.app.errors import BadInput
from tailrace.deployments.messages.rollout import SamplingParams


def sampling_of(args) -> SamplingParams:
    """Converts a `GRPOConfig` or `AsyncGRPOConfig`. Raises BadInput for a setting that the service does not support."""
    if args.repetition_penalty != 1.0:
        raise BadInput(f"repetition_penalty is {args.repetition_penalty}; the service samples without: set it to 1.0")
    if others := getattr(args, "generation_kwargs", None):
        named = ", ".join(sorted(others))
        raise BadInput(f"generation_kwargs has {named}; the service takes temperature, top_p, top_k and min_p alone")
    return SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k or 0, min_p=args.min_p or 0.0
    )
