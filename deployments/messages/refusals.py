"""Fields that trainers and other servers' clients send and that are not honoured: each with the reason, and its
substitute.

Invariant: no field is ignored in silence. Read by the messages of a rollout when they are made.
"""

from collections.abc import Container

PENALTY = "not supported: a token's distribution would depend on earlier tokens, not only on the model; remove it"
ENDING = "not supported: a sample ends at an end-of-sequence token, one of stop_token_ids or max_tokens; remove it"
GRAMMAR = "structured outputs are not supported; remove it, and check the answers in the reward function"

REFUSED = {
    "n": "give PromptGroup.samples instead",
    "best_of": "give PromptGroup.samples instead, and choose in the reward function",
    "seed": "give RolloutBatch.seed instead; each sample's key is derived from it",
    "stop": "stop strings are not supported; give stop_token_ids instead",
    "stop_strings": "stop strings are not supported; give stop_token_ids instead",
    "max_new_tokens": "give PromptGroup.max_tokens instead",
    "max_completion_tokens": "give PromptGroup.max_tokens instead",
    "repetition_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "logit_bias": "not supported: logits are the model's own; remove it",
    "bad_words": "not supported: logits are the model's own; remove it",
    "min_tokens": ENDING,
    "ignore_eos": ENDING,
    "structured_outputs": GRAMMAR,
    "guided_decoding": GRAMMAR,
    "response_format": GRAMMAR,
    "logprobs": "remove it: every sample comes with logprobs and raw_logprobs of its tokens",
    "prompt_logprobs": "not supported: only generated tokens have logprobs; remove it",
}
"""Reason of each refusal, in one line."""


def refusal(given: object, known: Container[str]) -> str | None:
    """Reason to refuse the keys `given` to a message with the fields `known`, or None if no key is in REFUSED."""
    keys = given if isinstance(given, dict) else ()
    return next((f"{key}: {REFUSED[key]}" for key in keys if key in REFUSED and key not in known), None)
