"""Tailrace as the rollout service of verl. The module `plugin` fills verl's registries."""

import verl  # noqa: F401 - first, since it imports modules of this package while it loads its plug-ins
