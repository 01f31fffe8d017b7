"""Fits of length laws to recorded lengths."""
