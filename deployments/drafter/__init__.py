"""Draft models on replicas of their own, running ahead of the verifying engines (SpecActor 4.1)."""
