"""The service's decision code on a modelled clock: `RolloutCore` and its policies over modelled replicas."""
