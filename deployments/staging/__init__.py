"""Weights staged in the shared memory of a node: written by a trainer, read by the replicas there."""
