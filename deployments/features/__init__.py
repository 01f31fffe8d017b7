"""Processed images, videos and sounds of prompts: their form in requests, their names, and their way into vLLM."""
