"""Batches in flight: prompts, the tokens of every sample, delivery to drivers, and the log of tokens on disk."""
