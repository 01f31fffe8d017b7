"""Colours of pages and pictures."""
