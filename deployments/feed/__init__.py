"""One stream of deltas for watchers of a service: its state as rows, then each time the rows that have changed."""
