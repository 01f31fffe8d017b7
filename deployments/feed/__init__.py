"""One stream of deltas for those that watch a service: its state as rows, and each time the rows that have changed."""
