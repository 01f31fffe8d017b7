"""`RolloutCore` and its books: who waits, what runs where, whose KV lies in the pool, how many replicas."""
