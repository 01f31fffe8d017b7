"""Oddities by seed, in samples, engines, drivers, policies and actors, and checks of their effects."""
