"""Tests of agents' harnesses: each is a program of its own, against one gateway."""
