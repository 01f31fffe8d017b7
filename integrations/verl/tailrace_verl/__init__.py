"""Tailrace as the rollout service of verl. Importing it loads neither verl nor Ray; `plugin` fills verl's registries."""
