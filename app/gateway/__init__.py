"""HTTP in vLLM's dialect, for trainers and clients without Ray: a Serve application of its own over open sessions."""
