"""Costs of metrics, for the coordinator and for an engine; called by `tailrace bench metrics`."""
