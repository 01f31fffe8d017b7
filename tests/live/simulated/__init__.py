"""Tests of the real shell over a simulated cluster: no Ray cluster and no engine, so two can run at a time."""
