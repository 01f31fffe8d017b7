"""Parts of `RolloutClient`: its kinds of calls, their blocking twins, and how they survive the coordinator's loss."""
