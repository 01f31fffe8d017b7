"""Adapters for TRL: trainers of TRL 1.16 whose samples Tailrace generates. Extra `train`."""
