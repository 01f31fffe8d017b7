"""Samples of a run's steps, as the trainer asks for them: by turns, while the tail runs, or steps ahead."""
