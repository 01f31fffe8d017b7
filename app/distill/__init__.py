"""A draft model made from its target: some of its layers, taught by the target on available rollouts."""
