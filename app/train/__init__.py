"""The learner: GRPO by TRL on tasks whose answers can be checked, with samples of the service."""
