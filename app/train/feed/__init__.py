"""Samples of a run's steps in the order in which the trainer uses them: by turns, during the tail, or steps ahead."""
