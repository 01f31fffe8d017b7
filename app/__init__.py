"""Composition: configuration, the Serve application, the client and the command line."""
