"""The steps of `gpu check`, each called in a process of its own."""
