"""The coordinator: the only ingress, a live shell around `RolloutCore`."""
