"""Worlds that a share of the seeds have: quotas, early ends, turns, and others; each with laws of its own."""
