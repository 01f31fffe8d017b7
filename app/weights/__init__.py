"""Weights of trainers that are not TRL's: names as they are saved, and the actor for vLLM's own trainer engines."""
