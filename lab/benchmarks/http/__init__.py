"""Benchmarks of the HTTP gateway, with `vllm serve` on the same model as the baseline."""
