"""Oddities by seed: of samples and engines, of drivers and policies, of actors; and checks of their effects."""
