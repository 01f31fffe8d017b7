"""Fields that trainers and other servers' clients send and that are not supported: each with the reason and its
substitute.

Invariant: no field is silently ignored. Read by the messages of a rollout when they are created.
"""

from collections.abc import Container

SAMPLING = "give SamplingParams.{} instead"
GRAMMAR = "give SamplingParams.structured_outputs instead"

REFUSED = {
    "n": "give PromptGroup.samples instead",
    "best_of": "give PromptGroup.samples instead, and choose in the reward function",
    "seed": "give RolloutBatch.seed instead; each sample's key is derived from it",
    "stop": SAMPLING.format("stop"),
    "stop_strings": SAMPLING.format("stop"),
    "max_new_tokens": "give PromptGroup.max_tokens instead",
    "max_completion_tokens": "give PromptGroup.max_tokens instead",
    "repetition_penalty": SAMPLING.format("repetition_penalty"),
    "presence_penalty": SAMPLING.format("presence_penalty"),
    "frequency_penalty": SAMPLING.format("frequency_penalty"),
    "logit_bias": SAMPLING.format("logit_bias"),
    "bad_words": SAMPLING.format("bad_words"),
    "min_tokens": SAMPLING.format("min_tokens"),
    "ignore_eos": SAMPLING.format("ignore_eos"),
    "structured_outputs": GRAMMAR,
    "guided_decoding": GRAMMAR,
    "response_format": GRAMMAR,
    "logprobs": "remove it: every sample comes with logprobs and raw_logprobs of its tokens",
    "prompt_logprobs": SAMPLING.format("prompt_logprobs"),
}
"""Reason of each refusal, in one line."""


def refusal(given: object, known: Container[str]) -> str | None:
    """Returns why the keys `given` to a message with the fields `known` are refused, or None if no key is in
    REFUSED.
    """
    keys = given if isinstance(given, dict) else ()
    return next((f"{key}: {REFUSED[key]}" for key in keys if key in REFUSED and key not in known), None)
