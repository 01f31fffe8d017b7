"""Gradients of a step: the order in which they are computed and added, and their threads."""
