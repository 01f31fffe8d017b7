"""HistoPipe (RhymeRL 6): pipelines over training steps, simulated."""
