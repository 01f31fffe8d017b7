"""One engine replica: vLLM stepped in a thread, exact sampling, and the Serve shell around it."""
