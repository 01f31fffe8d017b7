"""The coordinator: the only ingress. It feeds events to `RolloutCore` and performs its actions."""
