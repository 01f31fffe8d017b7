"""A draft model made from its target: some of its layers, taught by it on rollouts at hand."""
