"""The protocol of the rollout core: events in, actions out, and the read-only views that policies see."""
