"""`RolloutClient` and its parts: batches, single samples, what it has loaded, refusals, and survival of a lost service."""
