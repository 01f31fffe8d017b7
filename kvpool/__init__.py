"""KEEPS: keys and versions of KV, and (once it is there) the pool that outlives every replica."""
