"""Beside the service: simulators, replays, reports, faults and verification. The service never imports it."""
