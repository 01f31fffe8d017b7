"""Tests that need a service on two replicas, and share one: in the order of their names, since the last change it."""
