"""The HTTP client: the gateway's routes, by the names and types of `RolloutClient`. Loads httpx and pydantic alone."""
