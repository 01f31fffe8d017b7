"""Worlds that a share of the seeds have, such as quotas, early ends and turns, each with laws of its own."""
