"""The files of a run: rows, groups, checkpoints, a picture."""
