"""The draft index of a group: which tokens come next, and how sure that is. Loaded by engines alone."""
