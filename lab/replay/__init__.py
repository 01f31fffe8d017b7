"""Recorded rollouts in the simulator: an engine's own drafting code on modelled replicas."""
