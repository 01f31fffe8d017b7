"""Defects planted by hand, and the command that shows which check finds each."""
