"""Commands that show: a service as it is, and a recorded run."""
