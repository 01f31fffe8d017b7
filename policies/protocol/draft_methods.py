"""Draft methods by name, as replicas report them and as chunks, races and results name them."""

from enum import StrEnum


class DraftMethod(StrEnum):
    """`group`: the group's index, with mates and history. `history`, `ngram`: parts of it. `model`: a draft model.
    `vllm`: vLLM's own drafter.
    """

    GROUP = "group"
    HISTORY = "history"
    NGRAM = "ngram"  # prompt lookup, in the sample's own answer too
    MODEL = "model"
    VLLM = "vllm"
