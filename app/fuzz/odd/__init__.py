"""Oddities of samples, engines, drivers and policies, each chosen by seed, and the checks of what they may do."""
