"""Benchmarks of one engine."""
