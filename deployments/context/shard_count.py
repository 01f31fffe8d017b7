"""Number of shards that the busy engines need. Pure, with the clock as an argument. Called by ContextService."""

from tailrace.deployments.context.config import ContextConfig


def shards_wanted(busy_replicas: int, config: ContextConfig) -> int:
    """Returns one shard for each `replicas_per_shard` replicas that run samples, within the configured limits."""
    return min(max(config.shards, -(-busy_replicas // config.replicas_per_shard)), config.max_shards)


class ShardCount:
    """The number over time: it grows at once, and falls after `shrink_after_s` in which no more were wanted."""

    def __init__(self, config: ContextConfig):
        self._config = config
        self._seen: list[tuple[float, int]] = []  # wishes that no later one exceeds, with the time of each

    def next(self, busy_replicas: int, now_s: float) -> int:
        """Returns the number of shards to have now."""
        wanted = shards_wanted(busy_replicas, self._config)
        lasting = [(at_s, shards) for at_s, shards in self._seen if at_s + self._config.shrink_after_s > now_s]
        self._seen = [(at_s, shards) for at_s, shards in lasting if shards > wanted] + [(now_s, wanted)]
        return self._seen[0][1]
