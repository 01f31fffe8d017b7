"""`RolloutCore` and its books: waiting samples, running chunks, KV in the pool, number of replicas."""
