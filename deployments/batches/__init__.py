"""Batches in flight: prompts, the tokens of every sample, hand-over to drivers, and the log of tokens on disk."""
