"""Simulators, replays, reports, faults and verification. The service never imports this package."""
