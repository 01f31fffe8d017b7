"""What a run of the learner leaves on disk: rows, groups, checkpoints, a picture."""
