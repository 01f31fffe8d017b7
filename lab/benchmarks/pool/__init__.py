"""Benchmarks of the KV pool."""
