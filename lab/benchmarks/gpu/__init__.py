"""The first ten minutes on a GPU: steps in order of value, each result written at once. `make gpu-check`."""
