"""Benchmarks that can be run again, with `tailrace bench NAME`."""
