"""Keys and versions of KV, and the pool that outlives every replica."""
