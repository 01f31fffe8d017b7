"""Trajectories of agents: a base URL and a key for a harness, its turns as a tree, and training rows of it."""
