"""Processed images, videos and sounds of prompts: their format in requests, their names, and their way into vLLM."""
