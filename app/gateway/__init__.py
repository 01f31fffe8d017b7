"""HTTP in vLLM's dialect, for trainers and clients without Ray: a separate Serve application over open sessions."""
