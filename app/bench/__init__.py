"""Benchmarks that can be run again; every figure is a ratio or stands beside its baseline of the same run."""
