"""Weights of trainers other than TRL's: their names in a saved folder, and the actor for vLLM's own trainer engines."""
