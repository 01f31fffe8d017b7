"""Long-lived lines of the coordinator: to its engine replicas (chunks, their ends, reports), from gateways (calls)."""
