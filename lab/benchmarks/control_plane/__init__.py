"""Benchmarks of the control plane: decisions, calls, messages, the group context."""
