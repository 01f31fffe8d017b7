"""Costs of boards that watch a service."""
