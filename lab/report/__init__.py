"""Charts and pages: one kit for the simulator, the timeline and the benchmarks."""
