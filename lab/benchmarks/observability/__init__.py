"""Costs of metrics, traces and board to the coordinator and to an engine; called by `tailrace bench observability`."""
