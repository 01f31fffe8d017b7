"""Policies and the rollout core: events and views in, actions out. Pure: no ray, vllm, torch, I/O, clock or
randomness.
"""
