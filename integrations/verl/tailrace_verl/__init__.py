"""Tailrace as the rollout service of verl. The module `plugin` fills verl's registries."""
