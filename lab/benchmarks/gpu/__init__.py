"""`make gpu-check`, for the first ten minutes on a GPU: steps in order of value. Each result is written at once."""
