"""The HTTP client: the gateway's routes, by the names and types of `RolloutClient`. Loads only httpx and pydantic."""
