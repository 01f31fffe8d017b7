"""vLLM plug-ins: exact sampling, weights, and how an engine is started."""
