"""SpecActor's systems (SpecActor 4) in the simulator."""
