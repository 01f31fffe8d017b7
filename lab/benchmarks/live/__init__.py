"""Benchmarks of a running service on real replicas."""
