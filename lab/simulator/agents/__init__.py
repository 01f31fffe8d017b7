"""Recorded sessions of agents on modelled replicas: whole trajectories by the product's core, and by other routers."""
