"""Gradients of a step: which group is computed when, on which threads, and the order in which they are added."""
