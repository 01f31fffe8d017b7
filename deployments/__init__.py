"""Thin Ray Serve shells around vLLM and the rollout core."""
