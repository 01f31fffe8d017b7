"""Trainers of TRL, against the real package, and a run of the learner."""
