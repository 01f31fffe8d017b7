"""Simulation of the live shell: the real coordinator, engine loops and client on a virtual clock, with faults."""
