"""Benchmarks of drafts: proposals, budgets, lengths, draft models."""
