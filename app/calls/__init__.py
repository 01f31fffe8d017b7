"""Parts of `RolloutClient`: its kinds of calls, their blocking twins, and how they outlive the coordinator."""
