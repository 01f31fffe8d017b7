"""Odd requests to a real engine in a process of its own, among healthy mates: drawn, run, checked and made smaller."""
