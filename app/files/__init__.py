"""Files that the command line reads and writes: prompts, results, dumps, traces."""
