"""Draft models on replicas of their own, which run ahead of the engines that verify (SpecActor 4.1)."""
