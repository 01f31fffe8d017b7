"""Tests that share a service with a draft model."""
