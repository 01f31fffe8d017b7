"""`RolloutClient` and its parts: batches, single samples, what it has loaded, refusals, survival of a lost service."""
