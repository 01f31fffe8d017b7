"""Whole steps of training on a modelled cluster: rollout by the live core, rewards, training and weights."""
